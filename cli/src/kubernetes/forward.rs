//! A port on loopback that leads to a port of a pod, through the Kubernetes API.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::answered;

/// An open tunnel. It ends when this is dropped.
pub struct Tunnel {
    address: SocketAddr,
    task: JoinHandle<()>,
}

/// Opens a tunnel to a port of a pod.
pub async fn open(pods: Api<Pod>, pod: &str, port: u16) -> anyhow::Result<Tunnel> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let pod = pod.to_owned();
    let task = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let Ok((near, _)) = accepted else { return };
                    let (pods, pod) = (pods.clone(), pod.clone());
                    connections.spawn(async move {
                        if let Err(error) = join(near, pods, &pod, port).await {
                            tracing::debug!(pod, error = format!("{error:#}"), "a tunnel broke off");
                        }
                    });
                }
                Some(_) = connections.join_next() => {}
            }
        }
    });
    Ok(Tunnel { address, task })
}

/// Copies both ways until either side ends.
async fn join(mut near: TcpStream, pods: Api<Pod>, pod: &str, port: u16) -> anyhow::Result<()> {
    let mut forward = answered(pods.portforward(pod, &[port])).await?;
    let mut far = forward.take_stream(port).context("the API forwards no such port")?;
    tokio::io::copy_bidirectional(&mut near, &mut far).await?;
    drop(far);
    forward.join().await?;
    Ok(())
}

impl Tunnel {
    /// The address of this end.
    pub fn url(&self, tls: bool) -> String {
        format!("{}://{}", if tls { "https" } else { "http" }, self.address)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.task.abort();
    }
}

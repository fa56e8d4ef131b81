//! An operator's certificates for the clusters that this process starts, and how tests reach members with them.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use baton_cluster::{Member, Registry, Role};
use baton_runtime::tls::{CertificateFiles, TlsRole};
use baton_runtime::{Tls, TlsConfig};
use tonic::transport::Channel;

use crate::binary::runtime_dir;

/// The newest last.
static KNOWN: Mutex<Vec<Tls>> = Mutex::new(Vec::new());

/// An operator of the cluster whose certificates are in this folder.
pub fn operator(folder: &Path) -> anyhow::Result<Tls> {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, TlsRole::Operator);
    let (tls_cert, tls_key, tls_ca) = (Some(certificate), Some(key), Some(authority));
    Tls::open(&TlsConfig { tls_cert, tls_key, tls_ca, ..TlsConfig::default() })?.context("no certificates")
}

/// From now on this process is an operator of that cluster.
pub fn learn(folder: &Path) -> anyhow::Result<Tls> {
    let tls = operator(folder)?;
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).push(tls.clone());
    Ok(tls)
}

/// The same for a `baton up` with this registry, if it has certificates of its own.
pub(super) fn learn_of_up(registry: &str) -> anyhow::Result<Option<Tls>> {
    match registry.strip_prefix("https://").and_then(|host| host.rsplit_once(':')) {
        Some((_, port)) => learn(&runtime_dir().join("baton").join(format!("up-{port}"))).map(Some),
        None => Ok(None),
    }
}

fn known() -> Vec<Tls> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).iter().rev().cloned().collect()
}

/// The registry of the only cluster that this process has started.
pub async fn connect(registry: &str) -> anyhow::Result<Arc<dyn Registry>> {
    let tls = known().into_iter().next().filter(|_| registry.starts_with("https://"));
    Ok(baton_cluster::connect(registry, tls.as_ref()).await?)
}

/// A channel to a member of any cluster that this process has started.
pub(super) async fn channel(member: &Member) -> anyhow::Result<Channel> {
    let Some(host) = member.grpc.strip_prefix("https://") else {
        return Ok(baton_cluster::channel(&member.grpc, None)?);
    };
    let role = match member.role {
        Role::Prefill => TlsRole::Prefill,
        Role::Decode | Role::KvStore => TlsRole::Decode,
        Role::Supervisor => TlsRole::Operator,
    };
    let mut problem = None;
    for tls in known() {
        let (name, port) = host.rsplit_once(':').context("a port")?;
        let client = tls.client([role], &[baton_runtime::tls::alpn::HTTP2]);
        match baton_runtime::tls::dial(name, port.parse()?, Some(&client)).await {
            Ok(_) => return Ok(baton_cluster::channel(&member.grpc, Some((&tls, role)))?),
            Err(error) => problem = Some(error),
        }
    }
    bail!("{member:?}: {problem:?}")
}

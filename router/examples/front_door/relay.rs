//! Copies bytes between clients and workers, and looks at none: what no router that writes each token to its client can do without.

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::Arguments;

/// Serves until it is killed. Connections go to the workers in turn.
pub async fn serve(arguments: &Arguments) {
    let listener = TcpListener::bind(arguments.must("listen")).await.unwrap();
    let workers: Vec<String> = arguments.must("to").split(',').map(str::to_owned).collect();
    println!("listening");
    for worker in workers.iter().cycle() {
        let (mut client, _) = listener.accept().await.unwrap();
        let worker = worker.clone();
        tokio::spawn(async move {
            let mut worker = TcpStream::connect(worker).await?;
            worker.set_nodelay(true)?;
            client.set_nodelay(true)?;
            copy_bidirectional(&mut client, &mut worker).await
        });
    }
}

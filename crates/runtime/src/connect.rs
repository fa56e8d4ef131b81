//! Connects to a host that has several addresses without waiting long for one that does not answer ("happy eyeballs", RFC 8305).

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// How long an address is tried alone; the value that RFC 8305 recommends.
const HEAD_START: Duration = Duration::from_millis(250);

/// Connects to the first address of `host` that answers.
///
/// # Errors
/// The name cannot be resolved, or no address accepts; then with what the last one said.
pub(crate) async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = tokio::net::lookup_host((host, port)).await?;
    first_connected(in_turn(addresses.collect()), TcpStream::connect).await
}

/// IPv6 and IPv4 addresses in turn, each family in the resolver's order and the resolver's first one first.
fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|address| address.is_ipv6() == first);
    let mut other = other.into_iter();
    let mut mixed: Vec<_> = one.into_iter().flat_map(|address| [Some(address), other.next()]).flatten().collect();
    mixed.extend(other);
    mixed
}

/// Tries one address after another, the next when the one before fails or has had its head start. The first connection is kept.
async fn first_connected<T, F>(
    addresses: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> F + Copy + Send + 'static,
) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send,
{
    let mut left = addresses.into_iter();
    // Those that are not needed any more end when this is dropped.
    let mut attempts = JoinSet::new();
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    loop {
        match left.next() {
            Some(address) => drop(attempts.spawn(async move { connect(address).await })),
            None if attempts.is_empty() => return Err(failed),
            None => {}
        }
        tokio::select! {
            Some(ended) = attempts.join_next() => match ended {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => failed = error,
                Err(panicked) => failed = io::Error::other(panicked),
            },
            () = tokio::time::sleep(HEAD_START), if left.len() > 0 => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    fn addresses(all: &[&str]) -> Vec<SocketAddr> {
        all.iter().map(|address| address.parse().unwrap()).collect()
    }

    /// Port 1 refuses at once, 2 never answers, 3 answers after a second, others at once.
    async fn fake(address: SocketAddr) -> io::Result<u16> {
        match address.port() {
            1 => return Err(io::ErrorKind::ConnectionRefused.into()),
            2 => std::future::pending().await,
            3 => sleep(Duration::from_secs(1)).await,
            _ => {}
        }
        Ok(address.port())
    }

    async fn milliseconds(all: &[&str]) -> (Option<u16>, u128) {
        let begun = Instant::now();
        let port = first_connected(addresses(all), fake).await.ok();
        (port, begun.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_does_not_answer_delays_the_next_by_its_head_start() {
        assert_eq!(milliseconds(&["1.1.1.1:2", "1.1.1.1:4"]).await, (Some(4), 250));
        assert_eq!(milliseconds(&["1.1.1.1:2", "1.1.1.1:2", "1.1.1.1:3", "1.1.1.1:2"]).await, (Some(3), 1500));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_refuses_delays_nothing_and_the_last_refusal_is_told() {
        assert_eq!(milliseconds(&["1.1.1.1:1", "1.1.1.1:1", "1.1.1.1:4"]).await, (Some(4), 0));
        assert_eq!(milliseconds(&["1.1.1.1:1", "1.1.1.1:1"]).await, (None, 0));
        assert_eq!(milliseconds(&[]).await, (None, 0));
    }

    #[test]
    fn families_take_turns() {
        let mixed = in_turn(addresses(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1"]));
        assert_eq!(mixed, addresses(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"]));
        let mixed = in_turn(addresses(&["1.1.1.1:1", "[::1]:1", "[::2]:1"]));
        assert_eq!(mixed, addresses(&["1.1.1.1:1", "[::1]:1", "[::2]:1"]));
    }

    #[tokio::test]
    async fn a_real_listener_is_reached_by_its_name() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        connect("localhost", listener.local_addr().unwrap().port()).await.unwrap();
    }
}

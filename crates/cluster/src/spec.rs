//! Which registry a cluster uses, as one line of text.

use std::str::FromStr;

use baton_membership::is_host_port;

use crate::error::ClusterError;

/// Cluster name if the specification gives none.
const DEFAULT_CLUSTER: &str = "default";

/// A parsed registry specification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Spec {
    /// `http://host:port` or `https://host:port`: the registry inside the router with this internal address.
    Embedded {
        /// The address, as `http://host:port`, whether with TLS or not.
        endpoint: String,
        /// With TLS.
        tls: bool,
    },
    /// `etcd://host:port,host:port/cluster`, or `etcds://` with TLS: etcd, with all keys below `/baton/<cluster>/`.
    Etcd {
        /// The servers, each as `host:port`.
        endpoints: Vec<String>,
        /// Name of the cluster, among those that share this etcd; "default" if absent.
        cluster: String,
        /// With TLS.
        tls: bool,
    },
}

impl FromStr for Spec {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Spec, ClusterError> {
        let bad = |problem| ClusterError::Spec { spec: text.to_owned(), problem };
        match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => {
                let host = rest.strip_suffix('/').unwrap_or(rest);
                match is_host_port(host) {
                    true => Ok(Spec::Embedded { endpoint: format!("http://{host}"), tls: scheme == "https" }),
                    false => Err(bad("it needs a host and a port, and nothing after them")),
                }
            }
            Some((scheme @ ("etcd" | "etcds"), rest)) => {
                let (hosts, cluster) = rest.split_once('/').unwrap_or((rest, DEFAULT_CLUSTER));
                let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
                if !endpoints.iter().all(|e| is_host_port(e)) {
                    return Err(bad("each endpoint needs a host and a port"));
                }
                if !is_name(cluster) {
                    return Err(bad("the cluster's name must be 1 to 63 of a-z, 0-9 and -"));
                }
                Ok(Spec::Etcd { endpoints, cluster: cluster.to_owned(), tls: scheme == "etcds" })
            }
            Some(_) => Err(bad("it must begin with http://, https://, etcd:// or etcds://")),
            None => Err(bad("it has no scheme")),
        }
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_specifications() {
        let embedded = |endpoint: &str| Spec::Embedded { endpoint: endpoint.to_owned(), tls: false };
        assert_eq!("http://127.0.0.1:8002".parse(), Ok(embedded("http://127.0.0.1:8002")));
        assert_eq!("http://router.prod:8002/".parse(), Ok(embedded("http://router.prod:8002")));
        assert_eq!("http://[::1]:8002".parse(), Ok(embedded("http://[::1]:8002")));
        let etcd = |endpoints: &[&str], cluster: &str| Spec::Etcd {
            endpoints: endpoints.iter().map(|e| e.to_string()).collect(),
            cluster: cluster.to_owned(),
            tls: false,
        };
        let secure = Spec::Embedded { endpoint: "http://r:8002".to_owned(), tls: true };
        assert_eq!("https://r:8002".parse(), Ok(secure));
        assert!(matches!("etcds://a:1".parse(), Ok(Spec::Etcd { tls: true, .. })));
        assert_eq!("etcd://a:2379,b:2379".parse(), Ok(etcd(&["a:2379", "b:2379"], "default")));
        assert_eq!("etcd://a:2379/blue".parse(), Ok(etcd(&["a:2379"], "blue")));
    }

    #[test]
    fn bad_specifications_say_why_and_what_to_write() {
        for (bad, why) in [
            ("", "no scheme"),
            ("127.0.0.1:8002", "no scheme"),
            ("ftp://a:1", "must begin with"),
            ("http://host", "a host and a port"),
            ("http://host:0", "a host and a port"),
            ("http://host:99999", "a host and a port"),
            ("http://host:+80", "a host and a port"),
            ("http://host:1/path", "nothing after"),
            ("http://user@host:1", "a host and a port"),
            ("http://:1", "a host and a port"),
            ("etcd://", "each endpoint"),
            ("etcd://a:1,,b:1", "each endpoint"),
            ("etcd://a:1/", "cluster's name"),
            ("etcd://a:1/Blue/x", "cluster's name"),
        ] {
            let text = bad.parse::<Spec>().unwrap_err().to_string();
            assert!(text.contains(why) && text.contains("use http://host:port"), "{bad}: {text}");
        }
    }
}

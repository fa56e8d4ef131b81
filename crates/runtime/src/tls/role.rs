//! What a certificate makes its holder: the roles named in its URIs, `spiffe://CLUSTER/baton/ROLE`.
//!
//! A certificate counts only if an authority of the cluster issued it. So the name of the cluster is for people, and addresses in
//! certificates do not matter: pods and laptops change theirs.

use std::fmt;

use rustls::pki_types::CertificateDer;

/// What a process may be to others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TlsRole {
    /// Sends requests to workers; holds the embedded registry.
    Router,
    /// Computes prompts, sends KV.
    Prefill,
    /// Takes KV, streams tokens.
    Decode,
    /// A person's program, or a supervisor: asks and scales the cluster.
    Operator,
}

/// Several roles.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct TlsRoles(u8);

impl TlsRole {
    /// All roles.
    pub const ALL: [TlsRole; 4] = [TlsRole::Router, TlsRole::Prefill, TlsRole::Decode, TlsRole::Operator];

    /// Its name in certificates.
    pub fn name(self) -> &'static str {
        match self {
            TlsRole::Router => "router",
            TlsRole::Prefill => "prefill",
            TlsRole::Decode => "decode",
            TlsRole::Operator => "operator",
        }
    }

    /// The URI that gives a certificate this role, in a cluster of this name.
    pub fn uri(self, cluster: &str) -> String {
        format!("spiffe://{cluster}/baton/{}", self.name())
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl TlsRoles {
    /// The roles of a certificate. It need not be valid.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<TlsRoles, rustls::Error> {
        let bad = |_| rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding);
        let certificate = webpki::EndEntityCert::try_from(certificate).map_err(bad)?;
        let role = |uri: &str| {
            let (_, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
            TlsRole::ALL.into_iter().find(|role| path.strip_prefix("baton/") == Some(role.name()))
        };
        Ok(certificate.valid_uri_names().filter_map(role).collect())
    }

    /// Whether this role is among them.
    pub fn has(self, role: TlsRole) -> bool {
        self.0 & role.bit() != 0
    }

    /// Whether any role is in both.
    pub fn meets(self, others: TlsRoles) -> bool {
        self.0 & others.0 != 0
    }
}

impl FromIterator<TlsRole> for TlsRoles {
    fn from_iter<I: IntoIterator<Item = TlsRole>>(roles: I) -> TlsRoles {
        TlsRoles(roles.into_iter().fold(0, |all, role| all | role.bit()))
    }
}

impl fmt::Display for TlsRoles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = TlsRole::ALL.into_iter().filter(|role| self.has(*role)).map(TlsRole::name).collect();
        f.write_str(&if names.is_empty() { "none".to_owned() } else { names.join(", ") })
    }
}

impl fmt::Debug for TlsRoles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsRoles({self})")
    }
}

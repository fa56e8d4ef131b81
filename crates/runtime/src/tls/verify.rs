//! What a peer's certificate must say: an authority of the cluster issued it, it is valid now, and it gives a role that is wanted here.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme};

use super::live::{Live, provider};
use super::role::TlsRoles;

/// Checks peers, by the authorities that the files hold now.
#[derive(Debug)]
pub(super) struct Peers {
    live: Arc<Live>,
    wanted: TlsRoles,
    provider: Arc<CryptoProvider>,
}

/// Why a certificate that an authority issued is refused.
struct OtherRole {
    has: TlsRoles,
    wanted: TlsRoles,
}

impl fmt::Display for OtherRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OtherRole { has, wanted } = self;
        write!(f, "its certificate has the role {has}; here it must be one of {wanted}")
    }
}

/// The library shows errors of others this way.
impl fmt::Debug for OtherRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for OtherRole {}

impl Peers {
    /// Peers must have one of these roles.
    pub fn new(live: Arc<Live>, wanted: TlsRoles) -> Peers {
        Peers { live, wanted, provider: provider() }
    }

    fn check_role(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let (has, wanted) = (TlsRoles::of(certificate)?, self.wanted);
        match has.meets(wanted) {
            true => Ok(()),
            false => {
                let other = OtherError(Arc::new(OtherRole { has, wanted }));
                Err(Error::InvalidCertificate(CertificateError::Other(other)))
            }
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Only TLS 1.3 is spoken.
fn no_tls12() -> Error {
    Error::General("TLS 1.2 is not spoken here".to_owned())
}

impl ClientCertVerifier for Peers {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // They may change; clients have one certificate anyway.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let material = self.live.material();
        let clients = material.clients.as_ref().ok_or(Error::NoCertificatesPresented)?;
        let verified = clients.verify_client_cert(end_entity, intermediates, now)?;
        self.check_role(end_entity).map(|()| verified)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ServerCertVerifier for Peers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let material = self.live.material();
        let algorithms = self.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &material.roots, intermediates, now, algorithms)?;
        self.check_role(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

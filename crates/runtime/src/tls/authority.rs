//! Makes certificates: an authority of its own for a cluster, and a certificate for each role.
//!
//! Meant for those who have no authority of theirs: `baton certs`, and `baton up` for its own processes.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

use super::role::TlsRole;
use crate::error::RuntimeError;

/// How long an authority is good for.
const AUTHORITY_DAYS: u64 = 3650;
/// Certificates are good from this long before they are made: clocks differ.
const SLACK: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Issues certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    key: String,
    cluster: String,
}

/// A certificate and its key, in PEM.
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

/// The files of one process in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CertificateFiles {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that are trusted.
    pub authority: PathBuf,
}

impl CertificateFiles {
    /// The files of a role in `folder`.
    pub fn of(folder: &Path, role: TlsRole) -> CertificateFiles {
        let file = |end: &str| folder.join(format!("{}{end}.pem", role.name()));
        CertificateFiles { certificate: file(""), key: file("-key"), authority: folder.join("ca.pem") }
    }
}

impl Authority {
    /// A new authority for the cluster of this name.
    ///
    /// # Errors
    /// The system has no randomness, or the name cannot be in a certificate.
    pub fn new(cluster: &str) -> Result<Authority, RuntimeError> {
        let key = KeyPair::generate().map_err(failed)?;
        let (params, pem) = (authority(&key)?, key.serialize_pem());
        let certificate = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), certificate, key: pem, cluster: cluster.to_owned() })
    }

    /// The authority whose key and certificate these are, in PEM.
    ///
    /// # Errors
    /// The key is none.
    pub fn from_pem(key: &str, certificate: &str, cluster: &str) -> Result<Authority, RuntimeError> {
        let pair = KeyPair::from_pem(key).map_err(failed)?;
        let (params, certificate) = (authority(&pair)?, certificate.to_owned());
        Ok(Authority {
            issuer: Issuer::new(params, pair),
            certificate,
            key: key.to_owned(),
            cluster: cluster.to_owned(),
        })
    }

    /// Its certificate, in PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Its private key, in PEM.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// A certificate with these roles, good for so many days.
    ///
    /// # Errors
    /// The cluster's name cannot be in a certificate.
    pub fn issue(&self, roles: &[TlsRole], days: u64) -> Result<Issued, RuntimeError> {
        let names: Vec<_> = roles.iter().map(|role| role.name()).collect();
        let uri = |role: &TlsRole| Ok(SanType::URI(role.uri(&self.cluster).try_into().map_err(failed)?));
        self.sign(&names.join(", "), roles.iter().map(uri).collect::<Result<_, RuntimeError>>()?, days)
    }

    /// A certificate of a server that is no process of Baton's, known by these host names and addresses, good for so many days. It gives no
    /// role.
    ///
    /// # Errors
    /// A name cannot be in a certificate.
    pub fn issue_server(&self, name: &str, hosts: &[String], days: u64) -> Result<Issued, RuntimeError> {
        let host = |host: &String| match host.parse() {
            Ok(address) => Ok(SanType::IpAddress(address)),
            Err(_) => Ok(SanType::DnsName(host.clone().try_into().map_err(failed)?)),
        };
        self.sign(name, hosts.iter().map(host).collect::<Result<_, RuntimeError>>()?, days)
    }

    fn sign(&self, name: &str, holders: Vec<SanType>, days: u64) -> Result<Issued, RuntimeError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("baton {name}"));
        params.subject_alt_names = holders;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        valid(&mut params, days);
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?.pem();
        Ok(Issued { certificate, key: key.serialize_pem() })
    }

    /// Writes a certificate for each of the roles into `folder`, as [`CertificateFiles::of`] names them, but not the authority's own.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, folder: &Path, roles: &[TlsRole], days: u64) -> Result<(), RuntimeError> {
        for role in roles {
            let (issued, files) = (self.issue(&[*role], days)?, CertificateFiles::of(folder, *role));
            // Who reads them meanwhile sees a key that is not the certificate's, and waits for both.
            write_private(&files.key, &issued.key)?;
            write_private(&files.certificate, &issued.certificate)?;
        }
        Ok(())
    }
}

/// The first certificate of a bundle, which is the newest authority's.
pub fn newest_certificate(bundle: &str) -> &str {
    const END: &str = "-----END CERTIFICATE-----";
    let line = |at: usize| bundle[at..].find('\n').map_or(bundle.len(), |end| at + end + 1);
    &bundle[..bundle.find(END).map_or(bundle.len(), line)]
}

/// Replaces a file that only its owner may read.
///
/// # Errors
/// It cannot be written.
pub fn write_private(path: &Path, text: &str) -> Result<(), RuntimeError> {
    let failed = |e: std::io::Error| RuntimeError::Write { path: path.to_owned(), problem: e.to_string() };
    let fresh = path.with_extension("pem.new");
    let _ = fs::remove_file(&fresh);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&fresh, path).map_err(failed)
}

/// An authority's certificate follows from its key, but for its dates.
fn authority(key: &KeyPair) -> Result<CertificateParams, RuntimeError> {
    let mut params = CertificateParams::default();
    let number: String = key.public_key_raw().iter().skip(1).take(8).map(|byte| format!("{byte:02x}")).collect();
    params.distinguished_name.push(DnType::CommonName, format!("baton authority {number}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid(&mut params, AUTHORITY_DAYS);
    Ok(params)
}

fn valid(params: &mut CertificateParams, days: u64) {
    let now = SystemTime::now();
    params.not_before = (now - SLACK).into();
    params.not_after = (now + DAY * u32::try_from(days).unwrap_or(u32::MAX)).into();
}

fn failed(error: rcgen::Error) -> RuntimeError {
    RuntimeError::MakeCertificate(error.to_string())
}

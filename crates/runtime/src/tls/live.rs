//! Certificates and keys from files, read again when they change. Whoever shakes hands later uses the new ones; connections stay.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::RootCertStore;
use rustls::client::ResolvesClientCert;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;

use crate::error::RuntimeError;
use crate::shutdown::Shutdown;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How soon they are looked at again after they changed: a set that is being written is taken once two looks find the same.
const LOOK_AGAIN: Duration = Duration::from_millis(300);
/// Largest file, bytes.
const MAX_FILE: u64 = 1 << 20;

/// The fields that name the files, for errors.
#[derive(Clone, Debug)]
pub(super) struct Files {
    /// The field's name, and the file.
    pub certificate: (&'static str, PathBuf),
    pub key: (&'static str, PathBuf),
    /// None: peers show no certificate.
    pub authority: Option<(&'static str, PathBuf)>,
}

/// What the files hold now.
#[derive(Debug)]
pub(super) struct Material {
    pub key: Arc<CertifiedKey>,
    pub roots: Arc<RootCertStore>,
    /// Checks what clients show; None without an authority.
    pub clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// The bytes of the files.
type Texts = Vec<Vec<u8>>;

/// Files, and what they hold.
#[derive(Debug)]
pub(super) struct Live {
    files: Files,
    now: RwLock<(Arc<Texts>, Arc<Material>)>,
}

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

impl Live {
    /// Reads the files.
    ///
    /// # Errors
    /// Which one cannot be used, and why.
    pub fn open(files: Files) -> Result<Arc<Live>, RuntimeError> {
        let texts = read(&files)?;
        let material = parse(&files, &texts)?;
        Ok(Arc::new(Live { files, now: RwLock::new((Arc::new(texts), Arc::new(material))) }))
    }

    pub fn material(&self) -> Arc<Material> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner).1)
    }

    fn texts(&self) -> Arc<Texts> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// The bytes of the files, in the order certificate, key, authority.
    pub fn pem(&self) -> Vec<Vec<u8>> {
        Vec::clone(&self.texts())
    }

    /// Reads the files again whenever they change, until the drain starts. Files that cannot be used change nothing.
    pub async fn watch(self: Arc<Live>, shutdown: Shutdown) {
        let mut complained = String::new();
        // What the last look found.
        let mut seen = None;
        loop {
            let pause = if seen.is_some() { LOOK_AGAIN } else { LOOK_EVERY };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = shutdown.draining() => return,
            }
            let files = self.files.clone();
            let Ok(texts) = tokio::task::spawn_blocking(move || read(&files)).await else { continue };
            let problem = match texts {
                Ok(texts) if texts == *self.texts() => {
                    seen = None;
                    None
                }
                Ok(texts) if seen.as_ref() != Some(&texts) => {
                    seen = Some(texts);
                    continue;
                }
                Ok(texts) => {
                    seen = None;
                    self.replace(texts).err()
                }
                Err(problem) => Some(problem),
            };
            let problem = problem.map(|problem| problem.to_string()).unwrap_or_default();
            if !problem.is_empty() && problem != complained {
                tracing::warn!(problem, "certificates cannot be read again; the old ones stay");
            }
            complained = problem;
        }
    }

    fn replace(&self, texts: Texts) -> Result<(), RuntimeError> {
        let material = parse(&self.files, &texts)?;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = (Arc::new(texts), Arc::new(material));
        tracing::info!(certificate = %self.files.certificate.1.display(), "certificates read again");
        Ok(())
    }
}

impl ResolvesServerCert for Live {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.material().key))
    }
}

impl ResolvesClientCert for Live {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.material().key))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn read(files: &Files) -> Result<Texts, RuntimeError> {
    let all = [Some(&files.certificate), Some(&files.key), files.authority.as_ref()];
    all.into_iter().flatten().map(|(field, path)| read_file(field, path)).collect()
}

fn read_file(field: &'static str, path: &Path) -> Result<Vec<u8>, RuntimeError> {
    let length = std::fs::metadata(path).map_err(|e| unusable(field, path, e))?.len();
    if length > MAX_FILE {
        return Err(unusable(field, path, format!("it has {length} bytes; at most {MAX_FILE} are allowed")));
    }
    std::fs::read(path).map_err(|e| unusable(field, path, e))
}

fn parse(files: &Files, texts: &Texts) -> Result<Material, RuntimeError> {
    let Files { certificate, key, authority } = files;
    let chain = certificates(certificate, &texts[0])?;
    let private = PrivateKeyDer::from_pem_slice(&texts[1]).map_err(|e| unusable(key.0, &key.1, e))?;
    let provider = provider();
    // Also checks that the key is the certificate's.
    let certified = CertifiedKey::from_der(chain, private, &provider).map_err(|e| unusable(key.0, &key.1, e))?;
    let mut roots = RootCertStore::empty();
    let mut clients = None;
    if let Some(authority) = authority {
        for certificate in certificates(authority, &texts[2])? {
            roots.add(certificate).map_err(|e| unusable(authority.0, &authority.1, e))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), provider).build();
        clients = Some(verifier.map_err(|e| unusable(authority.0, &authority.1, e))?);
    }
    Ok(Material { key: Arc::new(certified), roots: Arc::new(roots), clients })
}

fn certificates(file: &(&'static str, PathBuf), text: &[u8]) -> Result<Vec<CertificateDer<'static>>, RuntimeError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let all = all.map_err(|e| unusable(file.0, &file.1, e))?;
    match all.is_empty() {
        true => Err(unusable(file.0, &file.1, "it holds no certificate")),
        false => Ok(all),
    }
}

fn unusable(field: &'static str, path: &Path, why: impl ToString) -> RuntimeError {
    RuntimeError::Certificate { field, path: path.to_owned(), problem: why.to_string() }
}

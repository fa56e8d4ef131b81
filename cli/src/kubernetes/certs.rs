//! `baton certs --secret`: a cluster's certificates as Secrets, as the Helm chart uses them. Run again, it makes what is missing and renews
//! what ends soon, so an upgrade or a CronJob may run it at any time.
//!
//! Each Secret is of the type kubernetes.io/tls, with `ca.crt` beside `tls.crt` and `tls.key`, which is also what cert-manager makes.
//! `PREFIX-ca` has the authority: its key makes further certificates, and no process but this one reads it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use baton_runtime::tls::{Authority, Issued, TlsRole, newest_certificate, write_private};
use baton_runtime::{Tls, TlsConfig, random_secret};
use baton_types::random_u64;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};

use super::{answered, client};
use crate::certs::OwnCertificates;

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";
/// Annotation: until when a certificate is good, in seconds since 1970.
const GOOD_UNTIL: &str = "baton/good-until";
/// Certificates are renewed when less than 1/`RENEWED_AT` of their lifetime is left.
const RENEWED_AT: u64 = 3;
const DAY: u64 = 24 * 3600;

/// Who shows a certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Holder {
    /// A process of the cluster.
    Role(TlsRole),
    /// Another server, known by these names: etcd.
    Server { name: String, hosts: Vec<String> },
}

/// What is to change beside what is missing or ends soon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Nothing,
    Renew,
    NewAuthority,
    DropOldAuthority,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub prefix: String,
    pub cluster: String,
    pub holders: Vec<Holder>,
    pub days: u64,
    pub change: Change,
    /// A secret from which the names of KV follow, too.
    pub kv_secret: bool,
    /// Labels of the Secrets.
    pub labels: BTreeMap<String, String>,
}

/// What a Secret has: its texts, and until when its certificate is good.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Held {
    texts: BTreeMap<String, String>,
    good_until: u64,
}

impl Holder {
    fn name(&self) -> &str {
        match self {
            Holder::Role(role) => role.name(),
            Holder::Server { name, .. } => name,
        }
    }

    fn issue(&self, authority: &Authority, days: u64) -> anyhow::Result<Issued> {
        Ok(match self {
            Holder::Role(role) => authority.issue(&[*role], days)?,
            Holder::Server { name, hosts } => authority.issue_server(name, hosts, days)?,
        })
    }
}

impl Held {
    fn text(&self, key: &str) -> anyhow::Result<&str> {
        self.texts.get(key).map(String::as_str).with_context(|| format!("it has no {key}"))
    }
}

/// The Secrets to write, by name, the authority first: nothing is issued before it is trusted.
fn plan(wanted: &Wanted, there: &BTreeMap<String, Held>, now: u64) -> anyhow::Result<Vec<(String, Held)>> {
    let secret = |of: &str| format!("{}-{of}", wanted.prefix);
    let (own, mut writes) = (secret("ca"), Vec::new());
    let held = there.get(&own);
    let old = held.map_or(Ok(""), |held| held.text(AUTHORITIES)).with_context(|| format!("Secret {own}"))?;
    let (authority, bundle) = match held.filter(|_| wanted.change != Change::NewAuthority) {
        Some(held) => {
            let newest = newest_certificate(old);
            let authority = Authority::from_pem(held.text(KEY)?, newest, &wanted.cluster)?;
            (authority, if wanted.change == Change::DropOldAuthority { newest.to_owned() } else { old.to_owned() })
        }
        None => {
            let authority = Authority::new(&wanted.cluster)?;
            let bundle = format!("{}{old}", authority.certificate());
            (authority, bundle)
        }
    };
    if held.is_none() || bundle != old {
        let texts = [(CERTIFICATE, authority.certificate()), (KEY, authority.key()), (AUTHORITIES, &bundle)];
        writes.push((own, held_of(texts, u64::MAX)));
    }
    for holder in &wanted.holders {
        let name = secret(holder.name());
        let held = there.get(&name);
        // What a new authority issues is trusted only once everybody has the new bundle.
        let stays = wanted.change == Change::NewAuthority;
        let ends = |held: &Held| held.good_until < now + wanted.days * DAY / RENEWED_AT;
        match held.filter(|held| stays || (wanted.change != Change::Renew && !ends(held))) {
            Some(held) if held.texts.get(AUTHORITIES) == Some(&bundle) => {}
            Some(held) => {
                let texts = [(CERTIFICATE, held.text(CERTIFICATE)?), (KEY, held.text(KEY)?), (AUTHORITIES, &bundle)];
                writes.push((name, held_of(texts, held.good_until)));
            }
            None => {
                let issued = holder.issue(&authority, wanted.days)?;
                let texts = [(CERTIFICATE, &*issued.certificate), (KEY, &issued.key), (AUTHORITIES, &bundle)];
                writes.push((name, held_of(texts, now + wanted.days * DAY)));
            }
        }
    }
    Ok(writes)
}

fn held_of(texts: [(&str, &str); 3], good_until: u64) -> Held {
    Held { texts: texts.map(|(key, text)| (key.to_owned(), text.to_owned())).into(), good_until }
}

/// Makes and renews what is wanted, in a namespace; default: that of the kubeconfig's context, or of this pod.
pub async fn certs(wanted: &Wanted, namespace: Option<&str>) -> anyhow::Result<()> {
    let (client, default) = client().await?;
    let namespace = namespace.map_or(default, str::to_owned);
    let api: Api<Secret> = Api::namespaced(client, &namespace);
    let names =
        ["ca"].into_iter().chain(wanted.holders.iter().map(Holder::name)).map(|of| format!("{}-{of}", wanted.prefix));
    let mut secrets = BTreeMap::new();
    for name in names {
        if let Some(secret) = answered(api.get_opt(&name)).await.with_context(|| format!("reading Secret {name}"))? {
            secrets.insert(name, secret);
        }
    }
    if !secrets.contains_key(&format!("{}-ca", wanted.prefix)) && !secrets.is_empty() {
        let there = secrets.keys().cloned().collect::<Vec<_>>().join(", ");
        bail!("{there} are there, but the authority's Secret {}-ca is not; delete them, or put it back", wanted.prefix);
    }
    if secrets.is_empty() && wanted.change != Change::Nothing {
        bail!(
            "there are no Secrets {}-… in namespace {namespace}; name those that are there, or make new ones without this flag",
            wanted.prefix
        );
    }
    let there = secrets.iter().map(|(name, secret)| (name.clone(), held(secret))).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let writes = plan(wanted, &there, now)?;
    for (name, held) in &writes {
        write(&api, secrets.get(name), name, held, &wanted.labels)
            .await
            .with_context(|| format!("writing Secret {name}"))?;
        println!("{namespace}/{name}: written");
    }
    if wanted.kv_secret {
        make_kv_secret(&api, &format!("{}-kv", wanted.prefix), &wanted.labels).await?;
    }
    if writes.is_empty() {
        println!("{namespace}: all {} Secrets are there, and none ends soon", there.len());
    }
    Ok(())
}

/// Makes the Secret from which the names of KV follow. One that is there stays: with another one, KV that is kept would not be found.
async fn make_kv_secret(api: &Api<Secret>, name: &str, labels: &BTreeMap<String, String>) -> anyhow::Result<()> {
    if answered(api.get_opt(name)).await.with_context(|| format!("reading Secret {name}"))?.is_some() {
        return Ok(());
    }
    let data = [("secret".to_owned(), ByteString(random_secret()?.into_bytes()))].into();
    let metadata = ObjectMeta { name: Some(name.to_owned()), labels: Some(labels.clone()), ..ObjectMeta::default() };
    let secret = Secret { metadata, data: Some(data), ..Secret::default() };
    answered(api.create(&PostParams::default(), &secret)).await.with_context(|| format!("writing Secret {name}"))?;
    println!("{name}: written");
    Ok(())
}

fn held(secret: &Secret) -> Held {
    let data = secret.data.iter().flatten();
    let texts = data.map(|(key, bytes)| (key.clone(), String::from_utf8_lossy(&bytes.0).into_owned())).collect();
    let until =
        secret.metadata.annotations.as_ref().and_then(|all| all.get(GOOD_UNTIL)).and_then(|text| text.parse().ok());
    // One that does not say is renewed.
    Held { texts, good_until: until.unwrap_or(0) }
}

/// TLS with the certificate in a Secret.
pub fn operator(secret: &Secret) -> anyhow::Result<Tls> {
    let held = held(secret);
    // Files are how TLS takes them. They are read at once, and go with the folder.
    let folder = OwnCertificates::new(std::env::temp_dir().join(format!("baton-{:016x}", random_u64())))?;
    let file = |key: &str| -> anyhow::Result<Option<PathBuf>> {
        let path = folder.folder().join(key);
        write_private(&path, held.text(key)?)?;
        Ok(Some(path))
    };
    let config = TlsConfig {
        tls_cert: file(CERTIFICATE)?,
        tls_key: file(KEY)?,
        tls_ca: file(AUTHORITIES)?,
        ..TlsConfig::default()
    };
    Tls::open(&config)?.context("no certificates")
}

/// Creates a Secret, or replaces the one that was read: if somebody has changed it since, this fails.
async fn write(
    api: &Api<Secret>,
    before: Option<&Secret>,
    name: &str,
    held: &Held,
    labels: &BTreeMap<String, String>,
) -> anyhow::Result<()> {
    let mut secret = before.cloned().unwrap_or_else(|| Secret {
        metadata: ObjectMeta { name: Some(name.to_owned()), labels: Some(labels.clone()), ..ObjectMeta::default() },
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Secret::default()
    });
    let bytes = |(key, text): (&String, &String)| (key.clone(), ByteString(text.clone().into_bytes()));
    secret.data = Some(held.texts.iter().map(bytes).collect());
    secret.metadata.annotations.get_or_insert_default().insert(GOOD_UNTIL.to_owned(), held.good_until.to_string());
    let params = PostParams::default();
    match before {
        Some(_) => answered(api.replace(name, &params, &secret)).await?,
        None => answered(api.create(&params, &secret)).await?,
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn wanted(change: Change) -> Wanted {
        let etcd = Holder::Server { name: "etcd".into(), hosts: vec!["etcd-0.etcd".into()] };
        Wanted {
            prefix: "llm-tls".into(),
            cluster: "llm".into(),
            holders: TlsRole::ALL.into_iter().map(Holder::Role).chain([etcd]).collect(),
            days: 90,
            change,
            kv_secret: false,
            labels: BTreeMap::new(),
        }
    }

    /// Carries out what is planned; the names of what was written, without the prefix.
    fn run(there: &mut BTreeMap<String, Held>, change: Change, now: u64) -> Vec<String> {
        let writes = plan(&wanted(change), there, now).unwrap();
        let names = writes.iter().map(|(name, _)| name.trim_start_matches("llm-tls-").to_owned()).collect();
        there.extend(writes);
        names
    }

    const ALL: [&str; 6] = ["ca", "router", "prefill", "decode", "operator", "etcd"];

    #[test]
    fn what_is_missing_is_made_and_what_ends_soon_renewed() {
        let mut there = BTreeMap::new();
        assert_eq!(run(&mut there, Change::Nothing, NOW), ALL);
        let first = there.clone();
        assert_eq!(run(&mut there, Change::Nothing, NOW + 59 * DAY), [""; 0]);
        there.remove("llm-tls-decode");
        assert_eq!(run(&mut there, Change::Nothing, NOW + 59 * DAY), ["decode"]);
        assert_eq!(run(&mut there, Change::Nothing, NOW + 61 * DAY), ["router", "prefill", "operator", "etcd"]);
        assert_eq!(there["llm-tls-ca"], first["llm-tls-ca"], "the authority stays");
        let key = |all: &BTreeMap<String, Held>| all["llm-tls-router"].texts[KEY].clone();
        assert_ne!(key(&there), key(&first));
        assert_eq!(run(&mut there, Change::Renew, NOW + 61 * DAY), ALL[1..]);
    }

    #[test]
    fn a_new_authority_is_trusted_before_it_issues() {
        let mut there = BTreeMap::new();
        run(&mut there, Change::Nothing, NOW);
        let before = there.clone();
        assert_eq!(run(&mut there, Change::NewAuthority, NOW), ALL);
        let bundle = there["llm-tls-ca"].texts[AUTHORITIES].clone();
        assert_eq!(bundle.matches("BEGIN CERTIFICATE").count(), 2);
        for role in &ALL[1..] {
            let (old, new) = (&before[&format!("llm-tls-{role}")], &there[&format!("llm-tls-{role}")]);
            assert_eq!(new.texts[CERTIFICATE], old.texts[CERTIFICATE], "{role}: nothing new is shown yet");
            assert_eq!(new.texts[AUTHORITIES], bundle, "{role}");
        }
        assert_eq!(run(&mut there, Change::Nothing, NOW), [""; 0]);
        assert_eq!(run(&mut there, Change::Renew, NOW), ALL[1..]);
        assert_eq!(run(&mut there, Change::DropOldAuthority, NOW), ALL);
        let newest = newest_certificate(&bundle);
        assert_eq!(there["llm-tls-router"].texts[AUTHORITIES], newest);
        assert_ne!(newest, before["llm-tls-ca"].texts[AUTHORITIES]);
        assert_eq!(run(&mut there, Change::DropOldAuthority, NOW), [""; 0]);
    }

    #[test]
    fn an_authority_without_its_key_is_an_error() {
        let mut there = BTreeMap::new();
        run(&mut there, Change::Nothing, NOW);
        there.get_mut("llm-tls-ca").unwrap().texts.remove(KEY);
        assert_eq!(plan(&wanted(Change::Nothing), &there, NOW).unwrap_err().to_string(), "it has no tls.key");
    }
}

//! `baton certs`: certificates for the processes of a cluster, for those without an authority of their own. And the folder where
//! `baton up` keeps those of its processes.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use baton_runtime::tls::{Authority, CertificateFiles, TlsRole, newest_certificate, write_private};
use baton_runtime::{Tls, TlsConfig};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::kubernetes::{self, Change, Holder, Wanted};

/// How long certificates are good for, unless --days says otherwise.
const DAYS: &str = "365";

/// `baton certs`.
pub fn command() -> Command {
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help).conflicts_with_all(
            ["renew", "new-ca", "drop-old-ca"].into_iter().filter(|other| *other != name).collect::<Vec<_>>(),
        )
    };
    Command::new("certs")
        .about("Makes certificates for the processes of a cluster")
        .long_about(
            "Makes an authority and a certificate for each role (router, prefill, decode, operator) in a folder. Give each process the \
             files of its role: --tls-cert ROLE.pem --tls-key ROLE-key.pem --tls-ca ca.pem; `baton status` and `baton scale` take the \
             folder with --certs. ca-key.pem makes further certificates: keep it away from the processes.\n\n\
             A new authority, without stopping anything: --new-ca, copy ca.pem everywhere; --renew, copy the other files; --drop-old-ca, \
             copy ca.pem.",
        )
        .arg(
            Arg::new("folder")
                .required_unless_present("secret")
                .conflicts_with("secret")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("The folder"),
        )
        .args(secret_args())
        .arg(Arg::new("cluster").long("cluster").value_name("NAME").default_value("default").help("Name of the cluster, for people"))
        .arg(
            Arg::new("days")
                .long("days")
                .value_name("N")
                .default_value(DAYS)
                .value_parser(value_parser!(u64).range(1..=3650))
                .help("How long the certificates are good for"),
        )
        .arg(switch("renew", "Makes all certificates anew, by the authority that is there"))
        .arg(switch("new-ca", "Makes a new authority; the old one stays trusted, and certificates stay as they are"))
        .arg(switch("drop-old-ca", "Trusts only the newest authority from now on"))
}

/// Certificates as Secrets.
fn secret_args() -> [Arg; 5] {
    let arg = |name: &'static str| Arg::new(name).long(name).requires("secret").value_name("NAME");
    let each = |name: &'static str, what: &'static str| {
        arg(name).value_name(what).action(ArgAction::Append).value_parser(pair)
    };
    [
        Arg::new("secret").long("secret").value_name("PREFIX").help(
            "Instead of a folder: Secrets on Kubernetes, PREFIX-ROLE and PREFIX-ca. Makes what is missing, renews what has less than a third \
             of its time left",
        ),
        arg("namespace").short('n').help("Their namespace [default: that of the kubeconfig's context, or of this pod]"),
        each("server", "NAME=HOST,…").help("A certificate PREFIX-NAME for another server, such as etcd, known by these hosts; may be repeated"),
        Arg::new("kv-secret").long("kv-secret").requires("secret").action(ArgAction::SetTrue).help(
            "Also PREFIX-kv: a random secret for --kv-secret-file, made once and never changed",
        ),
        each("label", "KEY=VALUE").help("A label of the Secrets; may be repeated"),
    ]
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} has no ="))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Makes Secrets.
fn secrets(matches: &ArgMatches, prefix: &str, cluster: &str, days: u64) -> anyhow::Result<()> {
    let pairs = |name: &str| matches.get_many::<(String, String)>(name).into_iter().flatten().cloned();
    let servers = pairs("server")
        .map(|(name, hosts)| Holder::Server { name, hosts: hosts.split(',').map(str::to_owned).collect() });
    let changes =
        [("renew", Change::Renew), ("new-ca", Change::NewAuthority), ("drop-old-ca", Change::DropOldAuthority)];
    let wanted = Wanted {
        prefix: prefix.to_owned(),
        cluster: cluster.to_owned(),
        holders: TlsRole::ALL.into_iter().map(Holder::Role).chain(servers).collect(),
        days,
        change: changes.into_iter().find(|(flag, _)| matches.get_flag(flag)).map_or(Change::Nothing, |found| found.1),
        kv_secret: matches.get_flag("kv-secret"),
        labels: pairs("label").collect(),
    };
    let namespace = matches.get_one::<String>("namespace").map(String::as_str);
    crate::runtime()?.block_on(kubernetes::certs(&wanted, namespace))
}

/// Makes what is asked for.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let cluster = matches.get_one::<String>("cluster").context("a name is needed")?;
    let days = matches.get_one::<u64>("days").copied().unwrap_or(1);
    if let Some(prefix) = matches.get_one::<String>("secret") {
        return secrets(matches, prefix, cluster, days);
    }
    let folder = matches.get_one::<PathBuf>("folder").context("a folder is needed")?;
    let (bundle, key) = (folder.join("ca.pem"), folder.join("ca-key.pem"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(|| folder.display().to_string())?;
    let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
    let (there, asked) = (key.exists(), ["renew", "new-ca", "drop-old-ca"].iter().any(|flag| matches.get_flag(flag)));
    if !there && (bundle.exists() || asked) {
        bail!(
            "{} is not there; put the authority's key there, or name another folder for a new authority",
            key.display()
        );
    }
    if matches.get_flag("new-ca") || !there {
        let authority = Authority::new(cluster)?;
        let old = if there { read(&bundle)? } else { String::new() };
        // First what is trusted, so that nothing is ever issued that is not.
        write_private(&bundle, &format!("{}{old}", authority.certificate()))?;
        write_private(&key, authority.key())?;
        println!("{}: a new authority{}", bundle.display(), if there { ", and the ones before it" } else { "" });
        if there {
            println!("next: copy ca.pem to every process, then `baton certs {} --renew`", folder.display());
            return Ok(());
        }
    }
    let certificates = read(&bundle)?;
    let newest = newest_certificate(&certificates);
    if matches.get_flag("drop-old-ca") {
        write_private(&bundle, newest)?;
        println!("{}: only the newest authority", bundle.display());
        return Ok(());
    }
    let authority = Authority::from_pem(&read(&key)?, newest, cluster)?;
    let missing =
        |role: &TlsRole| matches.get_flag("renew") || !CertificateFiles::of(folder, *role).certificate.exists();
    let roles: Vec<TlsRole> = TlsRole::ALL.into_iter().filter(missing).collect();
    authority.write(folder, &roles, days)?;
    match roles.is_empty() {
        true => println!("nothing to do: every role has a certificate; --renew makes them anew"),
        false => {
            let names: Vec<_> = roles.iter().map(|role| role.name()).collect();
            println!("{}: certificates for {}, good for {days} days", folder.display(), names.join(", "));
        }
    }
    Ok(())
}

/// The files of a role as flags.
pub fn flags(folder: &Path, role: TlsRole) -> Vec<String> {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, role);
    let flag = |name: &str, path: PathBuf| [format!("--{name}"), path.display().to_string()];
    [flag("tls-cert", certificate), flag("tls-key", key), flag("tls-ca", authority)].concat()
}

/// An operator's TLS, from the folder of its certificates.
pub fn operator(folder: &Path) -> anyhow::Result<Tls> {
    let CertificateFiles { certificate, key, authority } = CertificateFiles::of(folder, TlsRole::Operator);
    let config =
        TlsConfig { tls_cert: Some(certificate), tls_key: Some(key), tls_ca: Some(authority), ..TlsConfig::default() };
    Tls::open(&config)?.context("no certificates")
}

/// Certificates of a `baton up`, for its life. The folder is only this user's, and goes with it.
pub struct OwnCertificates(PathBuf);

impl OwnCertificates {
    /// Makes an authority that nobody else has, and a certificate for each role. The authority's key is kept nowhere.
    ///
    /// `internal`: the port that only this `baton up` has, by which other commands find the folder; None: they must be told.
    pub fn make(internal: Option<u16>) -> anyhow::Result<OwnCertificates> {
        let name = internal.map_or_else(|| format!("up-pid-{}", std::process::id()), |port| format!("up-{port}"));
        let folder = base()?.join(name);
        let _ = fs::remove_dir_all(&folder);
        let own = OwnCertificates::new(folder)?;
        let authority = Authority::new("up")?;
        write_private(&own.0.join("ca.pem"), authority.certificate())?;
        authority.write(&own.0, &TlsRole::ALL, 3650)?;
        Ok(own)
    }

    /// A new folder without any yet.
    pub fn new(folder: PathBuf) -> anyhow::Result<OwnCertificates> {
        let parent = folder.parent().context("the folder is in one")?;
        fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
        fs::DirBuilder::new().mode(0o700).create(&folder).with_context(|| folder.display().to_string())?;
        Ok(OwnCertificates(folder))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }
}

impl Drop for OwnCertificates {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Where the folders of this user's `baton up` are.
fn base() -> anyhow::Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = variable("XDG_RUNTIME_DIR").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    Ok(base
        .context("neither XDG_RUNTIME_DIR nor HOME is set; name a folder of certificates with --certs")?
        .join("baton"))
}

/// Removes what a `baton up` that was killed left at this port.
pub fn forget(port: u16) {
    if let Ok(base) = base() {
        let _ = fs::remove_dir_all(base.join(format!("up-{port}")));
    }
}

/// The certificates of a `baton up` of this user on this machine, if it is one whose registry this is.
pub fn of_local(registry: &str) -> Option<PathBuf> {
    let (_, host) = registry.split_once("://")?;
    let address: SocketAddr = host.trim_end_matches('/').replace("localhost", "127.0.0.1").parse().ok()?;
    let folder = base().ok()?.join(format!("up-{}", address.port()));
    let about = fs::metadata(&folder).ok().filter(|_| address.ip().is_loopback())?;
    // A folder that others can write to may hold anybody's certificates.
    let own = about.uid() == rustix::process::getuid().as_raw() && about.permissions().mode() & 0o077 == 0;
    own.then_some(folder)
}

/// How to reach a registry: with the certificates in `given`, or those of this user's own `baton up`, or without any. Returns the registry's
/// address with the scheme that fits.
pub fn reach(registry: &str, given: Option<&PathBuf>) -> anyhow::Result<(String, Option<Tls>)> {
    let folder = given.cloned().or_else(|| of_local(registry));
    let Some(folder) = folder else {
        if registry.starts_with("https://") || registry.starts_with("etcds://") {
            bail!(
                "{registry} has TLS; name the folder with an operator's certificate by --certs (`baton certs` makes one)"
            );
        }
        return Ok((registry.to_owned(), None));
    };
    let tls = operator(&folder)?;
    let secure = registry.strip_prefix("http://").map_or_else(|| registry.to_owned(), |host| format!("https://{host}"));
    Ok((secure, Some(tls)))
}

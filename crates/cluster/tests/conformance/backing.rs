//! The registries under test. Each can be killed without warning and started again at the same address.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use baton_cluster::EmbeddedRegistry;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

pub trait Backing {
    /// The specification to connect to.
    fn spec(&self) -> String;
    /// Ends the registry as `kill -9` would.
    fn kill(&mut self);
    fn restart(&mut self);
}

/// The embedded registry, in its own runtime. Killing it cuts its connections and loses its members.
pub struct Embedded {
    addr: SocketAddr,
    runtime: Option<Runtime>,
}

impl Embedded {
    pub fn start() -> Embedded {
        let mut this = Embedded { addr: ([127, 0, 0, 1], 0).into(), runtime: None };
        this.restart();
        this
    }
}

impl Backing for Embedded {
    fn spec(&self) -> String {
        format!("http://{}", self.addr)
    }

    fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    fn restart(&mut self) {
        // The killed runtime's threads close its socket some time later.
        let listener = loop {
            match TcpListener::bind(self.addr) {
                Ok(listener) => break listener,
                Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => std::thread::yield_now(),
                Err(e) => panic!("{}: {e}", self.addr),
            }
        };
        self.addr = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let service = EmbeddedRegistry::new().service();
            Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)).await
        });
        self.runtime = Some(runtime);
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A real etcd on loopback, with its data in a temporary directory that survives a restart.
pub struct Etcd {
    data: tempfile::TempDir,
    client_port: u16,
    peer_port: u16,
    process: Option<Child>,
    /// Where its certificate is, if it takes only clients with one.
    certificates: Option<PathBuf>,
}

impl Etcd {
    pub fn start() -> Etcd {
        Etcd::start_with(None)
    }

    /// One that only clients with a certificate can use: tls.crt, tls.key and ca.crt are in this folder.
    pub fn with_tls(folder: &Path) -> Etcd {
        Etcd::start_with(Some(folder.to_owned()))
    }

    /// Ends it, and all that it knew is gone.
    pub fn wipe(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.data.path()).unwrap();
        std::fs::create_dir(self.data.path()).unwrap();
    }

    /// With the next start it has these certificates, or none.
    pub fn secure(&mut self, certificates: Option<PathBuf>) {
        self.certificates = certificates;
    }

    fn start_with(certificates: Option<PathBuf>) -> Etcd {
        for _ in 0..5 {
            let (client_port, peer_port) = free_ports();
            let (data, certificates) = (tempfile::tempdir().unwrap(), certificates.clone());
            let mut this = Etcd { data, client_port, peer_port, process: None, certificates };
            if this.try_start().is_ok() {
                return this;
            }
            // Another process took a port in between.
        }
        panic!("etcd does not start; run it by hand: {}", etcd_path())
    }

    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.client_port)
    }

    /// Starts etcd, and returns when it serves. The error is etcd's output.
    fn try_start(&mut self) -> Result<(), String> {
        let scheme = if self.certificates.is_some() { "https" } else { "http" };
        let client = format!("{scheme}://{}", self.endpoint());
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let mut command = Command::new(etcd_path());
        command
            .args(["--name", "test", "--logger", "zap", "--log-outputs", "stderr"])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}")])
            .arg("--data-dir")
            .arg(self.data.path())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(folder) = &self.certificates {
            for (flag, file) in [("--cert-file", "tls.crt"), ("--key-file", "tls.key"), ("--trusted-ca-file", "ca.crt")]
            {
                command.arg(flag).arg(folder.join(file));
            }
            command.arg("--client-cert-auth");
        }
        baton_runtime::die_with_parent(&mut command);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        self.process = Some(child);
        let mut output = String::new();
        for line in &mut lines {
            let line = line.map_err(|e| e.to_string())?;
            if line.contains("serving client traffic") {
                // Keep reading etcd's log, or etcd would block on writing it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(());
            }
            output += &line;
        }
        self.kill();
        Err(output)
    }
}

impl Backing for Etcd {
    fn spec(&self) -> String {
        let secure = if self.certificates.is_some() { "s" } else { "" };
        format!("etcd{secure}://{}/conformance", self.endpoint())
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.process.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn restart(&mut self) {
        self.try_start().unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Two ports that were free a moment ago.
fn free_ports() -> (u16, u16) {
    let listen = || TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (a, b) = (listen(), listen());
    (a.local_addr().unwrap().port(), b.local_addr().unwrap().port())
}

/// Path of the etcd that `tools/fetch-etcd` finds or fetches, once per test run.
fn etcd_path() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/fetch-etcd");
        let found = Command::new(script).output().unwrap();
        assert!(found.status.success(), "these tests need etcd: {}", String::from_utf8_lossy(&found.stderr));
        String::from_utf8(found.stdout).unwrap().trim().to_owned()
    })
}

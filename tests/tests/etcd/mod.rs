//! A real etcd that can be killed without warning and started again at the same address.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// An etcd on loopback; its data is in a temporary directory that survives a restart.
pub struct Etcd {
    program: String,
    data: tempfile::TempDir,
    client: String,
    peer: String,
    process: Option<Child>,
}

impl Etcd {
    /// Starts the etcd that `tools/fetch-etcd` finds or fetches.
    pub fn start() -> Etcd {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fetch-etcd");
        let found = Command::new(script).output().unwrap();
        assert!(found.status.success(), "this test needs etcd: {}", String::from_utf8_lossy(&found.stderr));
        let program = String::from_utf8(found.stdout).unwrap().trim().to_owned();
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        // Somebody else may take a port between its choice and etcd's start.
        for _ in 0..5 {
            let ports = [free(), free()];
            let [client, peer] = ports.map(|l| format!("http://{}", l.local_addr().unwrap()));
            let data = tempfile::tempdir().unwrap();
            let mut this = Etcd { program: program.clone(), data, client, peer, process: None };
            if this.try_start().is_ok() {
                return this;
            }
        }
        panic!("etcd does not start; run it by hand: {program}")
    }

    /// For `--registry`.
    pub fn spec(&self, cluster: &str) -> String {
        format!("{}/{cluster}", self.client.replace("http://", "etcd://"))
    }

    /// As by `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// At the same address, with the same data.
    pub fn restart(&mut self) {
        self.try_start().unwrap();
    }

    /// Returns when it serves; the error is its output.
    fn try_start(&mut self) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command
            .args(["--name", "test", "--logger", "zap", "--log-outputs", "stderr"])
            .args(["--listen-client-urls", &self.client, "--advertise-client-urls", &self.client])
            .args(["--listen-peer-urls", &self.peer, "--initial-advertise-peer-urls", &self.peer])
            .args(["--initial-cluster", &format!("test={}", self.peer)])
            .arg("--data-dir")
            .arg(self.data.path())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        baton_runtime::die_with_parent(&mut command);
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map_while(Result::ok);
        self.process = Some(process);
        let mut output = String::new();
        for line in &mut lines {
            if line.contains("serving client traffic") {
                // Nobody may stop reading, or etcd would block on its log.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(());
            }
            output += &line;
        }
        self.kill();
        Err(output)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

//! S3, by a server that is not ours. `tests/object-store/run` installs it and runs these tests.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_tests::cluster::{Cluster, ClusterOptions, models, signal_pid, wait};
use rustix::process::Signal;
use tempfile::TempDir;

use super::objects::{all_uploaded, comes_back, uploaded, with_objects};
use super::{PROMPTS, all, metric};

/// moto's server, with one bucket.
struct Server {
    child: Child,
    python: String,
    url: String,
    /// Its certificate, if it has one, in a folder of its own.
    certificate: Option<PathBuf>,
    _folder: TempDir,
}

impl Server {
    fn start(tls: bool) -> anyhow::Result<Server> {
        let python = std::env::var("BATON_TEST_S3").context("BATON_TEST_S3: run tests/object-store/run")?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new(&python);
        command.args(["-m", "moto.server", "--port", &port.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
        let folder = tempfile::tempdir()?;
        let certificate = tls.then(|| certificate(folder.path())).transpose()?;
        if let Some((certificate, key)) = &certificate {
            command.arg("--ssl-cert").arg(certificate).arg("--ssl-key").arg(key);
        }
        let url = format!("{}://127.0.0.1:{port}", if tls { "https" } else { "http" });
        let certificate = certificate.map(|(certificate, _)| certificate);
        let server = Server { child: command.spawn()?, python, url, certificate, _folder: folder };
        wait(|| std::net::TcpStream::connect(("127.0.0.1", port)).ok())?;
        server.run("s3.create_bucket(Bucket='blocks')")?;
        Ok(server)
    }

    /// Runs a line of Python with boto3's client as `s3`; returns what it prints.
    fn run(&self, line: &str) -> anyhow::Result<String> {
        let script = format!("import boto3\ns3 = boto3.client('s3')\n{line}");
        let output = Command::new(&self.python).args(["-c", &script]).envs(self.env()).output()?;
        ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn env(&self) -> Vec<(String, String)> {
        let variables = [
            ("AWS_ENDPOINT_URL", self.url.as_str()),
            ("AWS_REGION", "us-east-1"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", "me"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        // That of baton, and that of boto3.
        let trust = ["SSL_CERT_FILE", "AWS_CA_BUNDLE"];
        let trusted = |path: &PathBuf| trust.map(|name| (name.to_owned(), path.display().to_string()));
        variables.into_iter().chain(self.certificate.iter().flat_map(trusted)).collect()
    }

    fn cluster(&self, model: &Path) -> anyhow::Result<Cluster> {
        Cluster::start(ClusterOptions { env: self.env(), ..with_objects(model, "s3://blocks/some/prefix")? })
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        signal_pid(self.child.id(), signal)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A certificate of 127.0.0.1, and its key.
fn certificate(folder: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let (certificate, key) = (folder.join("certificate.pem"), folder.join("key.pem"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]);
    command.args(["subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]);
    let made = command.arg("-out").arg(&certificate).arg("-keyout").arg(&key).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok((certificate, key))
}

#[test]
#[ignore = "needs an S3 server: tests/object-store/run"]
fn s3_is_an_object_store() -> anyhow::Result<()> {
    whole(Server::start(false)?)
}

#[test]
#[ignore = "needs an S3 server: tests/object-store/run"]
fn s3_over_tls_is_an_object_store() -> anyhow::Result<()> {
    whole(Server::start(true)?)
}

/// What is uploaded comes back, and what changed meanwhile is computed.
fn whole(server: Server) -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = server.cluster(model.path())?;
    let want = all_uploaded(&cluster)?;
    cluster.stop()?;
    let cluster = server.cluster(model.path())?;
    comes_back(&cluster, &want)?;
    cluster.stop()?;
    let keys = "print(*(o['Key'] for o in s3.list_objects_v2(Bucket='blocks')['Contents']), sep='\\n')";
    let keys = server.run(keys)?;
    ensure!(keys.lines().count() >= 120 && keys.lines().all(|key| key.starts_with("some/prefix/decode-0/")), "{keys}");
    // I2: a byte of each is flipped.
    server.run(
        "for o in s3.list_objects_v2(Bucket='blocks')['Contents']:\n    body = bytearray(s3.get_object(Bucket='blocks', Key=o['Key'])['Body'].read())\n    \
         body[len(body) // 2] ^= 1\n    s3.put_object(Bucket='blocks', Key=o['Key'], Body=bytes(body))",
    )?;
    let cluster = server.cluster(model.path())?;
    uploaded(&cluster)?;
    let (got, cached) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!(cached.iter().all(|cached| *cached == 0), "{cached:?}");
    let found = || metric(&cluster, "baton_kv_tier_verify_failures_total", "tier=\"object\"").ok();
    wait(|| (found()? >= PROMPTS as f64).then_some(()))?;
    cluster.stop()
}

/// A server that stops in the middle, and one that is gone: answers are those of before, and come about as soon as computed.
#[test]
#[ignore = "needs an S3 server: tests/object-store/run"]
fn a_server_that_hangs_or_is_gone_costs_no_request() -> anyhow::Result<()> {
    let (mut server, model) = (Server::start(false)?, models::slow()?);
    let cluster = server.cluster(model.path())?;
    let begun = Instant::now();
    let want = all_uploaded(&cluster)?;
    let most = 2 * begun.elapsed() + Duration::from_secs(2 * PROMPTS);
    cluster.stop()?;
    let cluster = server.cluster(model.path())?;
    uploaded(&cluster)?;
    let again = |what: &str| -> anyhow::Result<()> {
        let begun = Instant::now();
        let (got, _) = all(&cluster)?;
        ensure!(got == want, "I1, {what}: {got:?} instead of {want:?}");
        ensure!(begun.elapsed() < most, "{what}: {:?} for {PROMPTS} prompts; {most:?} at most", begun.elapsed());
        Ok(())
    };
    server.signal(Signal::STOP)?;
    again("stopped")?;
    let failed = || metric(&cluster, "baton_kv_tier_object_errors_total", "").ok();
    wait(|| (failed()? >= 1.0).then_some(()))?;
    server.child.kill()?;
    server.child.wait()?;
    again("gone")?;
    cluster.stop()?;
    // Also one that is gone from the start.
    let cluster = server.cluster(model.path())?;
    let (got, _) = all(&cluster)?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    cluster.stop()
}

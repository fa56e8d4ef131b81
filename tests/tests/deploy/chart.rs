//! The chart as Helm renders it: manifests, and what the binary makes of the settings in them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, anyhow, ensure};
use baton_tests::binary;
use serde::Deserialize;
use serde_json::Value;

/// The components of every release whose pods run the binary.
pub const ROLES: [&str; 3] = ["router", "prefill", "decode"];
/// The one that a release may have besides.
pub const KV_STORE: &str = "kv-store";

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in the workspace")
}

pub fn chart() -> PathBuf {
    root().join("deploy/helm/baton")
}

fn helm() -> anyhow::Result<&'static Path> {
    static HELM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = HELM.get_or_init(|| {
        let output = Command::new(root().join("tools/fetch-helm")).output().map_err(|e| e.to_string())?;
        match output.status.success() {
            true => Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    });
    found.as_deref().map_err(|e| anyhow!("tools/fetch-helm: {e}"))
}

/// A rendered release.
pub struct Release {
    /// What it was rendered from, for messages.
    pub name: String,
    pub manifests: Vec<Value>,
}

impl Release {
    /// Renders with additional arguments of `helm template`.
    pub fn render(name: &str, arguments: &[&str]) -> anyhow::Result<Release> {
        let output = Command::new(helm()?)
            .args(["template", "test", "--namespace", "llm"])
            .arg(chart())
            .args(arguments)
            .output()
            .context("starting helm")?;
        ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let mut manifests = Vec::new();
        for document in serde_norway::Deserializer::from_slice(&output.stdout) {
            match Value::deserialize(document).with_context(|| format!("{name}: a manifest"))? {
                Value::Null => {}
                manifest => manifests.push(manifest),
            }
        }
        ensure!(!manifests.is_empty(), "{name}: nothing was rendered");
        Ok(Release { name: name.to_owned(), manifests })
    }

    /// The default values, every file that the chart brings for its own checks, and its examples; rendered once.
    pub fn all() -> anyhow::Result<&'static [Release]> {
        static ALL: OnceLock<Result<Vec<Release>, String>> = OnceLock::new();
        let rendered = ALL.get_or_init(|| Release::render_all().map_err(|e| format!("{e:#}")));
        rendered.as_deref().map_err(|e| anyhow!("{e}"))
    }

    fn render_all() -> anyhow::Result<Vec<Release>> {
        let mut releases = vec![Release::render("default values", &[])?];
        for folder in ["ci", "examples"] {
            let before = releases.len();
            for entry in std::fs::read_dir(chart().join(folder))? {
                let path = entry?.path();
                let path = path.to_str().context("a path in UTF-8")?;
                releases.push(Release::render(path, &["--values", path])?);
            }
            ensure!(releases.len() > before, "no value files in {folder}/");
        }
        Ok(releases)
    }

    pub fn of_kind<'a>(&'a self, kind: &str) -> impl Iterator<Item = &'a Value> {
        self.manifests.iter().filter(move |m| m["kind"] == kind)
    }

    /// The one object of a kind for a component.
    pub fn one(&self, kind: &str, role: &str) -> anyhow::Result<&Value> {
        let mut found = self.of_kind(kind).filter(|m| m["metadata"]["labels"]["app.kubernetes.io/component"] == role);
        let first = found.next().with_context(|| format!("{}: no {kind} of {role}", self.name))?;
        ensure!(found.next().is_none(), "{}: several {kind}s of {role}", self.name);
        Ok(first)
    }

    /// The components that this release has, of those whose pods run the binary.
    pub fn roles(&self) -> impl Iterator<Item = &'static str> {
        ROLES.into_iter().chain(self.one("StatefulSet", KV_STORE).is_ok().then_some(KV_STORE))
    }

    /// What makes the pods of a component.
    pub fn workload(&self, role: &str) -> anyhow::Result<&Value> {
        self.one(if role == KV_STORE { "StatefulSet" } else { "Deployment" }, role)
    }

    /// Everything that makes pods.
    pub fn workloads(&self) -> impl Iterator<Item = &Value> {
        self.manifests.iter().filter(|m| m["spec"]["template"]["spec"]["containers"].is_array())
    }

    /// What makes pods that go on for ever.
    pub fn services(&self) -> impl Iterator<Item = &Value> {
        self.workloads().filter(|workload| workload["kind"] != "Job")
    }

    /// The pod of a component, and its container.
    pub fn pod(&self, role: &str) -> anyhow::Result<(&Value, &Value)> {
        let pod = &self.workload(role)?["spec"]["template"]["spec"];
        let containers = list(&pod["containers"]);
        ensure!(containers.len() == 1, "{}: {role} has {} containers", self.name, containers.len());
        Ok((pod, &containers[0]))
    }

    /// The settings a component runs with: what the binary itself makes of its file and environment.
    pub fn settings(&self, role: &str) -> anyhow::Result<Settings> {
        let text = self.one("ConfigMap", role)?["data"]["baton.toml"].as_str().context("baton.toml")?;
        let environment = environment(self.pod(role)?.1)?;
        Settings::load(role, text, &environment).with_context(|| format!("{}: {role}", self.name))
    }
}

/// Settings as `--check-config` prints them.
pub struct Settings {
    pub values: toml::Table,
    /// Where each value came from.
    pub origins: BTreeMap<String, String>,
    /// All settings there are, also those without a value.
    pub known: Vec<String>,
}

impl Settings {
    /// Has the binary read a file and an environment.
    pub fn load(role: &str, file: &str, environment: &[(String, String)]) -> anyhow::Result<Settings> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("baton.toml");
        std::fs::write(&path, file)?;
        let mut command = binary::command()?;
        command.envs(environment.iter().cloned()).arg(role).arg("--config").arg(&path).arg("--check-config");
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        let mut settings = Settings { values: text.parse()?, origins: BTreeMap::new(), known: Vec::new() };
        for line in text.lines() {
            if let Some((key, _)) = line.strip_prefix("# ").and_then(|l| l.split_once(" is not set; ")) {
                settings.known.push(key.to_owned());
            } else if let (Some((key, _)), Some((_, origin))) = (line.split_once(" = "), line.rsplit_once("  # ")) {
                settings.known.push(key.to_owned());
                settings.origins.insert(key.to_owned(), origin.replace(&format!("{}:", path.display()), "line "));
            }
        }
        Ok(settings)
    }

    pub fn text(&self, key: &str) -> anyhow::Result<&str> {
        self.values.get(key).and_then(toml::Value::as_str).with_context(|| format!("{key} is not a text"))
    }
}

/// The environment a kubelet would make.
fn environment(container: &Value) -> anyhow::Result<Vec<(String, String)>> {
    let mut made: Vec<(String, String)> = Vec::new();
    for variable in list(&container["env"]) {
        let from = &variable["valueFrom"];
        let mut value = match (variable["value"].as_str(), from["fieldRef"]["fieldPath"].as_str()) {
            (Some(value), _) => value.to_owned(),
            (None, Some("status.podIP")) => "10.1.2.3".to_owned(),
            (None, Some("metadata.name")) => "pod-0".to_owned(),
            (None, None) if from["resourceFieldRef"]["resource"] == "requests.cpu" => "2".to_owned(),
            _ => anyhow::bail!("{variable} is given by nothing this test knows"),
        };
        for (name, earlier) in &made {
            value = value.replace(&format!("$({name})"), earlier);
        }
        made.push((variable["name"].as_str().context("name")?.to_owned(), value));
    }
    Ok(made)
}

/// The items of a list; none when it is absent.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// True when `labels` has all of `selector`, which must have some.
pub fn selects(selector: &Value, labels: &Value) -> bool {
    let selector = selector.as_object().filter(|s| !s.is_empty());
    selector.is_some_and(|s| s.iter().all(|(key, value)| labels[key] == *value))
}

/// The container port with a name.
pub fn port(container: &Value, name: &str) -> Option<u64> {
    list(&container["ports"]).iter().find(|p| p["name"] == name).and_then(|p| p["containerPort"].as_u64())
}

//! The models that a router serves, each with its workers.

use std::sync::Arc;

use baton_cluster::View;
use baton_types::{ErrorKind, SamplingParams};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::config::RouterConfig;
use crate::error::{RequestError, RouterError};
use crate::gate::Gate;
use crate::model::ServedModel;
use crate::worker::{Shared, Workers};

/// A model with its workers.
#[derive(Clone)]
pub(crate) struct Served {
    pub model: Arc<ServedModel>,
    pub workers: Arc<Workers>,
    /// Where requests wait for their turn: all where clients need a key, else batch work alone.
    pub gate: Arc<Gate>,
}

/// All models, at least one.
pub(crate) struct Models {
    first: Served,
    others: Vec<Served>,
    defaults: Arc<Defaults>,
}

/// How to sample where a request does not say, by the model it names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Defaults(Vec<(Vec<String>, SamplingParams)>);

impl std::fmt::Debug for Models {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Models({})", self.describe())
    }
}

impl Defaults {
    /// The same for all models.
    #[cfg(any(test, feature = "testing"))]
    pub fn only(defaults: SamplingParams) -> Defaults {
        Defaults(vec![(Vec::new(), defaults)])
    }

    /// Those of the model with this name; of the first one if there is none.
    pub fn of(&self, name: &str) -> SamplingParams {
        let named = self.0.iter().find(|(names, _)| names.iter().any(|own| own == name));
        named.or(self.0.first()).map(|(_, defaults)| defaults.clone()).unwrap_or_default()
    }
}

impl Served {
    fn new(model: ServedModel, config: &RouterConfig, shared: Shared<'_>) -> Served {
        let workers = Arc::new(Workers::new(&model, config, shared));
        let gate = Gate::new(Arc::clone(&workers));
        Served { model: Arc::new(model), workers, gate }
    }

    /// Longest sequence that clients can ask for now, tokens: the shortest of the workers' settings, or the model's own context
    /// while no worker is known.
    pub fn context_tokens(&self) -> u32 {
        self.workers.capacity().context().unwrap_or(self.model.context_tokens())
    }
}

impl Models {
    /// These models, without workers yet.
    ///
    /// # Errors
    /// There is none, or a name means two of them.
    pub fn new(
        models: impl IntoIterator<Item = ServedModel>,
        config: &RouterConfig,
        shared: Shared<'_>,
    ) -> Result<Models, RouterError> {
        let served = |model| Served::new(model, config, shared);
        let mut all = models.into_iter().map(served);
        let first = all.next().ok_or(RouterError::NoModel)?;
        let mut models = Models { first, others: all.collect(), defaults: Arc::default() };
        models.defaults = Arc::new(Defaults(models.all().map(sampled).collect()));
        let mut names: Vec<&str> = models.all().flat_map(|served| served.model.names()).collect();
        names.sort_unstable();
        match names.windows(2).find(|two| two[0] == two[1]) {
            Some(two) => Err(RouterError::SameName { name: two[0].to_owned() }),
            None => Ok(models),
        }
    }

    pub fn all(&self) -> impl Iterator<Item = &Served> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The model of requests that name none.
    pub fn first(&self) -> &Served {
        &self.first
    }

    /// The model that a request names; the first one if it names none.
    pub fn named(&self, name: &str) -> Result<&Served, RequestError> {
        if name.is_empty() {
            return Ok(&self.first);
        }
        let known = || self.all().map(|served| format!("{:?}", served.model.id())).collect::<Vec<_>>().join(", ");
        self.all().find(|served| served.model.names().any(|own| own == name)).ok_or_else(|| {
            let wrong = format!("the model {name:?} does not exist; this router serves {}", known());
            let error = RequestError::new(ErrorKind::NotFound, wrong).code("model_not_found");
            RequestError { param: Some("model".into()), ..error }
        })
    }

    /// How to sample where a request does not say.
    pub fn defaults(&self) -> Arc<Defaults> {
        Arc::clone(&self.defaults)
    }

    /// Applies a new view. Each model's fleet places on its own workers only; connections to the others are never made.
    pub fn update(&self, view: &Arc<View>) {
        for served in self.all() {
            served.workers.update(Arc::clone(view));
            served.gate.open();
        }
    }

    /// Why no request of any model can be served now; None when some can.
    pub fn not_ready(&self) -> Option<String> {
        let reasons: Option<Vec<_>> = self.all().map(|served| served.workers.not_ready()).collect();
        reasons.map(|reasons| reasons.join("; "))
    }

    /// Why a request was placed where it was, once for each placement; nothing if it is not known, or not any more.
    pub fn explain(&self, request: &str, since: Option<Instant>) -> Vec<Value> {
        self.all().flat_map(|served| served.workers.explain(request, since)).collect()
    }

    /// The view as JSON, for people and `baton status`.
    pub fn describe(&self) -> Value {
        let mut page = self.first.workers.describe();
        if self.others.is_empty() {
            return page;
        }
        let pages: Vec<_> = self.all().map(|served| served.workers.describe()).collect();
        // All pages have all members; that of a member's model knows how it fares.
        for member in page["members"].as_array_mut().into_iter().flatten() {
            let own = pages.iter().find(|page| page["model"] == member["model"]);
            let mut known = own.and_then(|page| page["members"].as_array()).into_iter().flatten();
            if let Some(known) = known.find(|known| known["id"] == member["id"]) {
                *member = known.clone();
            }
        }
        page["models"] = pages.iter().map(|p| json!({"model": p["model"], "served_name": p["served_name"]})).collect();
        page
    }
}

/// A model's names, and how to sample it where a request does not say.
fn sampled(served: &Served) -> (Vec<String>, SamplingParams) {
    (served.model.names().map(str::to_owned).collect(), served.model.defaults().clone())
}

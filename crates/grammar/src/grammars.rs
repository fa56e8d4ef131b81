//! Compiles constraints within limits, and caches the most recently used ones.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use baton_model_text::Tokenizer;
use baton_types::Constraint;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};

use crate::compose::parse_schema;
use crate::{GrammarError, vocabulary};

/// Most compiled constraints kept (I5) in addition to those of requests under way.
const KEPT: usize = 32;

/// The compiled constraints of one model. Cheap to create: the vocabulary is indexed for the first constraint.
pub struct Grammars {
    tokenizer: Tokenizer,
    rows: u32,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    /// Most recently used last.
    compiled: Mutex<VecDeque<Compiled>>,
}

struct Compiled {
    /// Requests under way hold clones of this.
    constraint: Arc<Constraint>,
    /// The matcher at the beginning of an answer.
    start: Matcher,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with this tokenizer and `rows` rows of logits.
    pub fn new(tokenizer: &Tokenizer, rows: u32) -> Grammars {
        let (factory, compiled) = (OnceLock::new(), Mutex::default());
        Grammars { tokenizer: tokenizer.clone(), rows, factory, compiled }
    }

    /// Compiles a constraint unless it is cached. Takes up to some hundred milliseconds, longer the first time, so it must not run on a
    /// thread that others wait for. While the returned value is held, [`crate::Matchers::mask`] finds the constraint compiled.
    pub fn prepare(&self, constraint: &Arc<Constraint>) -> Result<Arc<Constraint>, GrammarError> {
        let held = |compiled: &Compiled| Arc::clone(&compiled.constraint);
        if let Some(known) = self.known(constraint, held) {
            return Ok(known);
        }
        let start = self.compile(constraint)?;
        Ok(self.keep(Compiled { constraint: Arc::clone(constraint), start }))
    }

    /// A matcher at the beginning of an answer, independent of all others.
    pub(crate) fn start(&self, constraint: &Arc<Constraint>) -> Result<Matcher, GrammarError> {
        if let Some(known) = self.known(constraint, |compiled| compiled.start.deep_clone()) {
            return Ok(known);
        }
        let start = self.compile(constraint)?;
        let copy = start.deep_clone();
        self.keep(Compiled { constraint: Arc::clone(constraint), start });
        Ok(copy)
    }

    /// Adds a compiled constraint, and evicts the oldest that no request holds beyond [`KEPT`]. Returns the constraint to hold.
    fn keep(&self, new: Compiled) -> Arc<Constraint> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        // Two threads may have compiled the same constraint.
        if let Some(first) = compiled.iter().find(|c| c.constraint == new.constraint) {
            return Arc::clone(&first.constraint);
        }
        let held = Arc::clone(&new.constraint);
        compiled.push_back(new);
        let idle = |c: &Compiled| Arc::strong_count(&c.constraint) == 1;
        let mut surplus = compiled.iter().filter(|c| idle(c)).count().saturating_sub(KEPT);
        compiled.retain(|c| {
            let goes = surplus > 0 && idle(c);
            surplus -= usize::from(goes);
            !goes
        });
        held
    }

    fn known<T>(&self, constraint: &Constraint, what: impl FnOnce(&Compiled) -> T) -> Option<T> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let at = compiled.iter().position(|c| *c.constraint == *constraint)?;
        let found = compiled.remove(at)?;
        let known = what(&found);
        compiled.push_back(found);
        Some(known)
    }

    fn compile(&self, constraint: &Constraint) -> Result<Matcher, GrammarError> {
        let grammar = match constraint {
            Constraint::JsonSchema(text) => TopLevelGrammar::from_json_schema(parse_schema(text, constraint)?),
            Constraint::Regex(text) => TopLevelGrammar::from_regex(text),
            Constraint::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer, self.rows));
        let factory = factory.as_ref().map_err(GrammarError::clone)?;
        let parser = factory.create_parser(grammar).map_err(|e| GrammarError::refused(constraint, format!("{e:#}")))?;
        let mut start = Matcher::new(Ok(parser));
        // Detects at once that no answer can begin, and saves the first token of each answer some work.
        if !start.is_stopped() {
            start.compute_mask().map_err(|e| GrammarError::refused(constraint, e))?;
        }
        Ok(start)
    }
}

fn factory(tokenizer: &Tokenizer, rows: u32) -> Result<ParserFactory, GrammarError> {
    let failed = |e: &dyn std::fmt::Display| GrammarError::Vocabulary(e.to_string());
    let indexed = llguidance::panic_utils::catch_unwind(|| Ok(vocabulary::index(tokenizer, rows)));
    let mut factory = ParserFactory::new_simple(&indexed.map_err(|e| failed(&e))?).map_err(|e| failed(&e))?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// Limits on what one constraint may cost (I5): about 20 ms to compile a lexer, 15 ms per token and 20 MB of lexer states per sequence. The
/// usual cost is a hundredth of that.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_grammar_size: 100_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

//! Early rejection by the load at present, to compare with (Qin et al., "Mooncake", FAST 2025, section 7.2, which finds that it lets the load
//! of prefill and decode workers go up and down in turn).

use std::time::Duration;

use baton_latency::StepWork;
use baton_policy::{Candidate, Chosen, Missed, Placement, PlacementError, PlacementInput, Predicted, Slo, Terms};

/// Places as [`Predicted`] does, whatever the SLO. Then rejects what misses it by the prompts that are queued now, and by the answers that are
/// computed now: not by those that there will be when the answer begins.
pub(super) struct PresentLoad(pub Predicted);

impl Placement for PresentLoad {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError> {
        let chosen = self.0.place(view, &PlacementInput { slo: Slo::default(), ..*request })?;
        let decode = view.iter().find(|worker| worker.id == chosen.placed.decode).and_then(|worker| worker.load);
        let (Some(why), Some(load)) = (chosen.why, decode) else { return Ok(chosen) };
        let answers = StepWork { tokens: 0, pairs: 0, ..load.work }.with_row(request.tokens.into());
        let terms = Terms { token: load.cost.step(&answers), ..why.terms };
        let over = |limit: &Duration, seconds: f64| seconds > limit.as_secs_f64();
        let first_token = request.slo.first_token.filter(|limit| over(limit, terms.first_token));
        let token = request.slo.token.filter(|limit| over(limit, terms.token));
        match (first_token, token) {
            (None, None) => Ok(chosen),
            _ => Err(PlacementError::Late(Box::new(Missed {
                terms,
                first_token,
                token,
                deadline: None,
                waited: Duration::ZERO,
            }))),
        }
    }

    fn looks_at(&self) -> usize {
        self.0.looks_at()
    }
}

//! A summary of a model for people.
use crate::Model;
use serde::Serialize;
/// What `baton model inspect` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Name.
    pub name: String,
}
/// Summarises an open model.
pub fn inspect(model: &Model) -> Inspection {
    Inspection { name: model.name().to_owned() }
}

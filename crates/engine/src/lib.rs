//! baton-engine

//! baton-runtime

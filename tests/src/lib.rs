//! baton-tests

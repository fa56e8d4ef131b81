//! baton-cluster

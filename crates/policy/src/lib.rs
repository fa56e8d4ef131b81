//! baton-policy

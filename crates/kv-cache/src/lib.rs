//! baton-kv-cache

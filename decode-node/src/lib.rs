//! baton-decode-node

//! baton-kernels

//! What a test needs of its host, and may lack there: UCX, root, network namespaces. A GPU is none of it: `tests/gpu.sh` is for hosts
//! that have one.

pub use baton_types::testing::left_out;

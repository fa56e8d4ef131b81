//! Compiles the .proto files; the descriptor set feeds gRPC server reflection.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    tonic_prost_build::configure()
        .file_descriptor_set_path(out.join("baton.bin"))
        .compile_protos(&["baton/v1/inference.proto", "baton/v1/worker.proto", "baton/v1/cluster.proto"], &["."])?;
    println!("cargo:rerun-if-changed=baton/v1");
    Ok(())
}

//! Writes a tiny random model: `cargo run -p baton-tests --example tiny -- NAME DIRECTORY`, or lists the names.

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [name, directory] => baton_tests::tiny::config(name)?.write(Path::new(directory)),
        [] => {
            for model in baton_tests::tiny::configs()? {
                println!("{}", model.name);
            }
            Ok(())
        }
        _ => anyhow::bail!("usage: tiny [NAME DIRECTORY]"),
    }
}

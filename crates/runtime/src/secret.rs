//! Secrets in files.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::RuntimeError;

/// Fewest bytes of a secret.
pub const LEAST_SECRET: usize = 16;

/// The bytes of the file that this field names. White space at its end is not counted: editors add it.
///
/// # Errors
/// [`RuntimeError::Secret`]: the file cannot be read, or is too short.
pub fn secret_in(field: &'static str, path: &Path) -> Result<Vec<u8>, RuntimeError> {
    let refused = |problem: String| RuntimeError::Secret { field, path: path.to_owned(), problem };
    let mut bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    bytes.truncate(bytes.trim_ascii_end().len());
    if bytes.len() < LEAST_SECRET {
        return Err(refused(format!("it has {} bytes", bytes.len())));
    }
    Ok(bytes)
}

/// A secret of 32 random bytes, as hexadecimal digits.
///
/// # Errors
/// The system gives no random bytes.
pub fn random_secret() -> std::io::Result<String> {
    let mut random = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Makes a file with a random secret that only its owner may read. One that is there stays.
///
/// # Errors
/// The file cannot be written.
pub fn make_secret(path: &Path) -> Result<(), RuntimeError> {
    let make = || {
        let text = random_secret()?;
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(mut file) => file.write_all(format!("{text}\n").as_bytes()).and_then(|()| file.sync_all()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
    };
    make().map_err(|error| RuntimeError::Write { path: path.to_owned(), problem: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_enough_and_ends_where_its_text_does() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::write(folder.path().join("secret"), text).unwrap();
            secret_in("kv_secret_file", &folder.path().join("secret"))
        };
        assert_eq!(read("0123456789abcdef\n").unwrap(), b"0123456789abcdef");
        let short = read("0123456789abcde\n").unwrap_err().to_string();
        assert!(
            short.starts_with("kv_secret_file: ") && short.contains("it has 15 bytes; a file with at least 16"),
            "{short}"
        );
        let made = folder.path().join("made");
        make_secret(&made).unwrap();
        let secret = secret_in("kv_secret_file", &made).unwrap();
        make_secret(&made).unwrap();
        assert_eq!((secret.len(), secret_in("kv_secret_file", &made).unwrap()), (64, secret));
        let none = secret_in("kv_secret_file", &folder.path().join("none")).unwrap_err().to_string();
        assert!(none.contains("/none: No such file"), "{none}");
    }
}

//! The first token as it travels with the KV, from the prefill to the decode worker.

use baton_types::{BatonError, ErrorKind, TokenOut};

/// Encodes index and id, little-endian. The log probabilities and the digest of the logits go to the client directly.
pub fn write_first_token(token: &TokenOut) -> Vec<u8> {
    [token.index.to_le_bytes(), token.id.to_le_bytes()].concat()
}

/// The tail that came with the KV is not a first token.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FirstTokenError {
    /// The tail has the wrong length, in bytes.
    #[error("the handoff's tail has {0} bytes; a first token has 8")]
    Length(usize),
    /// The model has no such token. One such token would fail a whole batch (I8).
    #[error("the handoff's first token is {id}; the model's vocabulary has {vocab} tokens")]
    Token {
        /// The token's id.
        id: u32,
        /// Ids are below this.
        vocab: u32,
    },
}

impl BatonError for FirstTokenError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::DataLoss
    }
}

/// The inverse of [`write_first_token`], for a vocabulary of `vocab` tokens.
pub fn parse_first_token(tail: &[u8], vocab: u32) -> Result<TokenOut, FirstTokenError> {
    let bytes: [u8; 8] = tail.try_into().map_err(|_| FirstTokenError::Length(tail.len()))?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let id = word(4);
    if id >= vocab {
        return Err(FirstTokenError::Token { id, vocab });
    }
    Ok(TokenOut { index: word(0), id, ..TokenOut::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_survives_the_handoff() {
        let token = TokenOut { index: 7, id: 0x01020304, ..TokenOut::default() };
        let tail = write_first_token(&token);
        assert_eq!(parse_first_token(&tail, token.id + 1), Ok(token.clone()));
        assert_eq!(parse_first_token(&tail, token.id), Err(FirstTokenError::Token { id: token.id, vocab: token.id }));
        assert_eq!(parse_first_token(&[1, 2, 3], 9), Err(FirstTokenError::Length(3)));
    }
}

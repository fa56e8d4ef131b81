//! Reads a model's files: GGUF, safetensors, chat templates. A published file is as untrusted as a peer (I8).
//!
//! The first byte of an input says how the rest becomes a file:
//!
//! - even: zeros follow it as the tensor data that its header describes, so that mutations get past the check of the file's length;
//! - odd: the rest is the file.

mod seeds;

use std::cell::OnceCell;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use baton_model_files::{Model, ModelFileError};
use baton_model_text::{ChatMessage, ChatTemplate, FunctionCall, TemplateOptions, TextModel, ToolCall};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) use seeds::{chat_seeds, gguf_seeds, safetensors_seeds};

use crate::signature;

/// Most zero bytes after a header; seeds need fewer.
const ROOM: u64 = 1 << 16;

thread_local! {
    /// The folder that files are opened from; it is removed with its thread.
    static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Runs `work` in a folder that has all of a model except its weights. None if that fails.
fn in_folder<T>(work: impl FnOnce(&Path) -> std::io::Result<T>) -> Option<T> {
    FOLDER.with(|cell| {
        if cell.get().is_none() {
            let folder = tempfile::tempdir().ok()?;
            for (name, text) in seeds::beside_weights() {
                std::fs::write(folder.path().join(name), text).ok()?;
            }
            cell.set(folder).ok()?;
        }
        work(cell.get()?.path()).ok()
    })
}

/// Writes a file of these parts, followed by `room` zero bytes.
fn write(path: &Path, parts: &[&[u8]], room: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.set_len(parts.iter().map(|part| part.len() as u64).sum::<u64>() + room)
}

/// Opens a model. If that works, all its tensors can be read and have the stated length, and its text part opens alone and agrees.
fn opened(path: &Path) -> u64 {
    let (model, text) = (Model::open(path), TextModel::open(path));
    if let Ok(model) = &model {
        let sizes = text.map(|text| (text.vocab_size(), text.context_length(), text.chat_template().is_some()));
        let config = model.config();
        let want = (config.vocab_size, config.context_length, model.chat_template().is_some());
        assert_eq!(sizes.map_err(kind), Ok(want));
        for facts in model.tensors() {
            let tensor = model.find(facts.name).map(|tensor| (tensor.bytes().len() as u64, tensor.shape.clone()));
            assert_eq!(tensor, Some((facts.bytes(), facts.shape.clone())), "{facts:?}");
        }
        assert!(model.tokenizer().vocab_size() <= model.config().vocab_size as usize);
        // Tokenise and detokenise a text, whatever the result.
        let _ = model.tokenizer().encode("ab <s> \u{e9}", true).map(|ids| model.tokenizer().decode(&ids, true));
    }
    signature(&model.map(|model| (model.config().architecture, model.chat_template().is_some())).map_err(kind))
}

/// An error without the names chosen by the file.
fn kind(error: ModelFileError) -> String {
    let brief =
        |text: &str| text.split(['"', '`', '[', ':']).next().unwrap_or_default().chars().take(40).collect::<String>();
    match error {
        ModelFileError::Config { key, problem, .. } => format!("{} {}", brief(&key), brief(&problem)),
        ModelFileError::Tensor { problem, .. } => format!("tensor {}", brief(&problem)),
        ModelFileError::Malformed { reason, .. } => format!("malformed {}", brief(&reason)),
        ModelFileError::Truncated { what, .. } => format!("truncated {}", brief(&what)),
        other => brief(&format!("{other:?}")),
    }
}

pub(crate) fn gguf(input: &[u8]) -> u64 {
    let Some((how, file)) = input.split_first() else { return 0 };
    let room = if how % 2 == 0 { ROOM } else { 0 };
    let tried = in_folder(|folder| {
        let path = folder.join("model.gguf");
        write(&path, &[file], room)?;
        Ok(opened(&path))
    });
    tried.unwrap_or(0)
}

/// Opens a safetensors file. After an even byte the input is a header; its length is put before it, and zeros after it.
pub(crate) fn safetensors(input: &[u8]) -> u64 {
    let Some((how, header)) = input.split_first() else { return 0 };
    let tried = in_folder(|folder| {
        let path = folder.join("model.safetensors");
        if how % 2 == 0 {
            write(&path, &[&(header.len() as u64).to_le_bytes(), header], data_end(header).min(ROOM))?;
        } else {
            write(&path, &[header], 0)?;
        }
        Ok(opened(folder))
    });
    tried.unwrap_or(0)
}

/// Where the last tensor of a header ends.
fn data_end(header: &[u8]) -> u64 {
    let entries = serde_json::from_slice::<Value>(header).unwrap_or_default();
    let ends = entries.as_object().into_iter().flatten().filter_map(|(_, entry)| entry["data_offsets"][1].as_u64());
    ends.max().unwrap_or(0)
}

/// Whether a template uses `ns`, the seeds' namespace, other than to create it or to access its fields. Such a namespace may contain
/// itself. minijinja prints it until the stack overflows, which no caller can prevent.
fn may_hold_itself(source: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    source.match_indices("ns").any(|(at, _)| {
        let (before, after) = (&source[..at], &source[at + 2..]);
        let whole = !before.ends_with(word) && !after.starts_with(word);
        whole && !after.starts_with('.') && !after.starts_with(" = namespace")
    })
}

/// Compiles the input as a template and renders a conversation with it. The cost of a template is bounded (I5).
pub(crate) fn chat(input: &[u8]) -> u64 {
    let Ok(source) = std::str::from_utf8(input) else { return 0 };
    if may_hold_itself(source) {
        return 0;
    }
    let compiled = ChatTemplate::compile(Path::new("model"), source, "<s>".to_owned(), "</s>".to_owned());
    let template = match compiled {
        Ok(template) => template,
        Err(error) => return signature(&kind(error)),
    };
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000);
    let arguments = json!({"city": "Paris", "days": 3});
    let function = FunctionCall { name: "weather".to_owned(), arguments };
    let call = ToolCall { id: Some("c1".to_owned()), kind: "function".to_owned(), function };
    let messages = [
        ChatMessage::new("system", "Be brief."),
        ChatMessage::new("user", "What is the weather {{ bos_token }} in Paris?"),
        ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "") },
        ChatMessage { tool_call_id: Some("c1".to_owned()), ..ChatMessage::new("tool", "rain") },
    ];
    let tools = [json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})];
    let outcome = |tools: Option<&[Value]>, prompt| {
        let rendered = template.render_at(&messages, tools, prompt, &TemplateOptions::new(), now);
        assert_eq!(
            rendered.is_ok(),
            template.render_at(&messages, tools, prompt, &TemplateOptions::new(), now).is_ok(),
            "{source}"
        );
        rendered.map(|text| (text.len() / 64).min(4)).map_err(kind)
    };
    signature(&(template.tools(), outcome(None, true), outcome(Some(&tools), false)))
}

#[cfg(test)]
mod tests {
    use baton_model_files::Architecture;

    use super::*;

    /// Seeds must be whole models; otherwise mutations would only exercise the first checks.
    #[test]
    fn seeds_open() {
        let whole = |architecture, chat| signature(&Ok::<_, String>((architecture, chat)));
        let [pieces, bytes] = [0, 1].map(|at| gguf(&gguf_seeds()[at]));
        assert_eq!([pieces, bytes], [whole(Architecture::Llama, true), whole(Architecture::Mistral, true)]);
        let opened = [0, 1].map(|at| safetensors(&safetensors_seeds()[at]));
        assert_eq!(opened, [whole(Architecture::Llama, false); 2]);
    }
}

//! The file of `baton warm`. Pure.

use anyhow::{Context, bail};
use baton_proto::v1::{self, generate_request::Input};
use serde::Deserialize;

/// A prompt of a file.
#[derive(Clone, PartialEq, Debug)]
pub struct Prompt {
    /// Its line, from 1.
    pub line: usize,
    input: Input,
    cache_salt: String,
    keep_seconds: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a line must be a JSON string, or an object with `prompt` or `messages`")]
enum Line {
    Text(String),
    Fields(serde_json::Map<String, serde_json::Value>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    #[serde(default)]
    cache_salt: String,
    keep_seconds: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Message {
    role: String,
    content: String,
}

impl Prompt {
    /// A whole file as one prompt.
    pub fn of_text(text: String) -> Prompt {
        Prompt { line: 1, input: Input::Text(text), cache_salt: String::new(), keep_seconds: None }
    }

    /// The request that has the prompt computed. `keep_seconds`: where the line does not say.
    pub fn request(self, model: &str, keep_seconds: u32) -> v1::GenerateRequest {
        v1::GenerateRequest {
            model: model.to_owned(),
            input: Some(self.input),
            sampling: Some(v1::Sampling { max_tokens: Some(1), temperature: Some(0.0), ..Default::default() }),
            cache_salt: self.cache_salt,
            cache_keep_seconds: self.keep_seconds.unwrap_or(keep_seconds),
            ..Default::default()
        }
    }
}

/// The prompts of a file, one for each line that is not blank.
pub fn parse(text: &str) -> anyhow::Result<Vec<Prompt>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| parse_line(at + 1, line).with_context(|| format!("line {}", at + 1))).collect()
}

fn parse_line(line: usize, text: &str) -> anyhow::Result<Prompt> {
    let fields: Fields = match serde_json::from_str(text)? {
        Line::Text(text) => return Ok(Prompt { line, ..Prompt::of_text(text) }),
        Line::Fields(fields) => serde_json::from_value(fields.into())?,
    };
    let input = match (fields.prompt, fields.messages) {
        (Some(prompt), None) => Input::Text(prompt),
        (None, Some(messages)) if !messages.is_empty() => {
            let message = |Message { role, content }| v1::ChatMessage { role, content, ..Default::default() };
            Input::Chat(v1::Chat { messages: messages.into_iter().map(message).collect(), ..Default::default() })
        }
        _ => bail!("give either `prompt`, a string, or `messages`, a list that is not empty"),
    };
    Ok(Prompt { line, input, cache_salt: fields.cache_salt, keep_seconds: fields.keep_seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_prompts_and_messages_become_requests_of_one_token() {
        let text = "\"plain\"\n\n{\"prompt\": \"p\", \"cache_salt\": \"s\", \"keep_seconds\": 5}\n\
                    {\"messages\": [{\"role\": \"system\", \"content\": \"c\"}]}\n";
        let prompts = parse(text).unwrap();
        assert_eq!(prompts.iter().map(|prompt| prompt.line).collect::<Vec<_>>(), [1, 3, 4]);
        let requests: Vec<_> = prompts.into_iter().map(|prompt| prompt.request("m", 60)).collect();
        assert_eq!(requests[0].input, Some(Input::Text("plain".into())));
        assert_eq!((requests[0].cache_keep_seconds, requests[0].model.as_str()), (60, "m"));
        assert_eq!((requests[1].cache_keep_seconds, requests[1].cache_salt.as_str()), (5, "s"));
        assert!(matches!(&requests[2].input, Some(Input::Chat(chat)) if chat.messages[0].role == "system"));
        assert!(requests.iter().all(|request| request.sampling.as_ref().unwrap().max_tokens == Some(1)));
    }

    #[test]
    fn a_wrong_line_is_named_with_what_is_wrong() {
        for (wrong, why) in [
            ("3", "a line must be a JSON string"),
            ("{\"prompt\": \"p\", \"salt\": \"s\"}", "unknown field `salt`"),
            ("{\"cache_salt\": \"s\"}", "either `prompt`"),
            ("{\"prompt\": \"p\", \"messages\": []}", "either `prompt`"),
            ("{\"messages\": []}", "either `prompt`"),
            ("{\"prompt\"", "EOF"),
        ] {
            let error = format!("{:#}", parse(&format!("\"fine\"\n{wrong}")).unwrap_err());
            assert!(error.starts_with("line 2: ") && error.contains(why), "{wrong}: {error}");
        }
    }
}

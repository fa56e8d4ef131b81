//! Reads a request, as the chat that it amounts to.

use serde_json::{Map, Value, json};

use super::items::Messages;
use super::object::Frame;
use crate::error::RequestError;
use crate::input::GenerateInput;
use crate::openai::parse::parse;
use crate::openai::request::{Asked, Envelope, chat};

type Fields = Map<String, Value>;

/// Fields that are refused unless they say this, because nothing is stored here and no tool but the client's own is called.
const REFUSED: [(&str, &[&str]); 7] = [
    ("previous_response_id", &[]),
    ("conversation", &[]),
    ("prompt", &[]),
    ("background", &["false"]),
    ("truncation", &["\"disabled\""]),
    ("messages", &[]),
    ("n", &["1"]),
];

/// Fields without a meaning here.
const SKIPPED: [&str; 4] = ["store", "stream_options", "max_tool_calls", "include"];

/// Reads POST /v1/responses.
pub(crate) fn read(body: &[u8], envelope: Envelope) -> Result<(GenerateInput, Asked, Frame), RequestError> {
    let mut fields: Fields = parse(body)?;
    for (name, harmless) in REFUSED {
        let asks =
            fields.remove(name).filter(|value| !value.is_null() && !harmless.contains(&value.to_string().as_str()));
        if asks.is_some() {
            let wrong = format!("{name} is not supported; leave it out");
            return Err(RequestError::invalid(name, wrong).code("unsupported_parameter"));
        }
    }
    let frame = Frame::new(&fields);
    let mut messages = Messages::default();
    if let Some(text) = fields.remove("instructions").filter(|text| !text.is_null()) {
        messages.instruct(&text);
    }
    let missing = || RequestError::invalid("input", "input is missing; it must be a string or an array of items");
    messages.input(fields.remove("input").ok_or_else(missing)?)?;
    let paths = std::mem::take(&mut messages.paths);
    fields.insert("messages".to_owned(), messages.all.into());
    translate(&mut fields)?;
    let body = Value::from(fields).to_string();
    let (input, asked) = chat(body.as_bytes(), envelope).map_err(|error| reworded(error, &paths))?;
    Ok((input, asked, frame))
}

/// Renames and reshapes what chats have in another form.
fn translate(fields: &mut Fields) -> Result<(), RequestError> {
    let include = fields.get("include").and_then(Value::as_array);
    let logprobs = include.is_some_and(|all| all.iter().any(|what| what == "message.output_text.logprobs"));
    if logprobs || fields.get("top_logprobs").is_some_and(|top| !top.is_null() && *top != 0) {
        fields.insert("logprobs".to_owned(), true.into());
    }
    SKIPPED.iter().for_each(|name| drop(fields.remove(*name)));
    if let Some(most) = fields.remove("max_output_tokens") {
        fields.insert("max_completion_tokens".to_owned(), most);
    }
    if let Some(text) = fields.remove("text").filter(|text| !text.is_null()) {
        if !text.is_object() {
            return Err(RequestError::invalid("text", "text must be an object with a format"));
        }
        fields.insert("response_format".to_owned(), format(&text["format"]));
    }
    if let Some(Value::Array(tools)) = fields.get_mut("tools") {
        tools.iter_mut().enumerate().try_for_each(|(at, spec)| tool(at, spec))?;
    }
    if let Some(named) = fields.get_mut("tool_choice").filter(|choice| choice["type"] == "function") {
        *named = json!({"type": "function", "function": {"name": named["name"]}});
    }
    // A model that thinks only if it is told to.
    if fields.remove("reasoning").is_some_and(|reasoning| reasoning["effort"] == "none") {
        let options = fields.entry("chat_template_kwargs").or_insert_with(|| json!({}));
        if let Some(options) = options.as_object_mut() {
            options.entry("enable_thinking").or_insert(false.into());
        }
    }
    Ok(())
}

/// The form of the answer, as chats say it.
fn format(format: &Value) -> Value {
    match format["type"].as_str() {
        Some("json_schema") => {
            let mut schema = format.clone();
            schema.as_object_mut().map(|schema| schema.remove("type"));
            json!({"type": "json_schema", "json_schema": schema})
        }
        _ => format.clone(),
    }
}

/// A function, as chats say it.
fn tool(at: usize, spec: &mut Value) -> Result<(), RequestError> {
    if spec["type"] != "function" {
        let field = format!("tools[{at}].type");
        let wrong = format!("{field} is {}; it must be \"function\": no other tools are called here", spec["type"]);
        return Err(RequestError::invalid(field, wrong).code("unsupported_parameter"));
    }
    let mut function = std::mem::take(spec);
    function.as_object_mut().map(|function| function.remove("type"));
    *spec = json!({"type": "function", "function": function});
    Ok(())
}

/// An error that names the fields of a chat, with the names that the client knows. `paths`: those of the messages.
pub(crate) fn reworded(error: RequestError, paths: &[String]) -> RequestError {
    let mut names: Vec<(String, String)> = vec![
        ("max_completion_tokens".to_owned(), "max_output_tokens".to_owned()),
        ("response_format.json_schema".to_owned(), "text.format".to_owned()),
        ("response_format".to_owned(), "text.format".to_owned()),
        ("].function.".to_owned(), "].".to_owned()),
    ];
    // Later ones first: messages[1] is the beginning of messages[10], but for its bracket.
    let messages = paths.iter().enumerate().map(|(at, path)| (format!("messages[{at}]"), path.clone()));
    names.extend(messages);
    names.push(("messages".to_owned(), "input".to_owned()));
    let renamed = |text: &str| names.iter().fold(text.to_owned(), |text, (chat, own)| text.replace(chat, own));
    RequestError { message: renamed(&error.message), param: error.param.as_deref().map(renamed), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Prompt;
    use baton_types::RequestId;
    use tokio::time::Instant;

    fn envelope() -> Envelope {
        let now = Instant::now();
        let defaults = std::sync::Arc::<crate::models::Defaults>::default();
        Envelope { request_id: RequestId("r".into()), tenant: None, received: now, deadline: now, defaults, span: None }
    }

    fn of(body: Value) -> Result<(GenerateInput, Asked, Frame), RequestError> {
        read(body.to_string().as_bytes(), envelope())
    }

    #[test]
    fn a_request_is_the_chat_it_amounts_to() {
        let schema = json!({"type": "object"});
        let (input, asked, _) = of(json!({
            "model": "m", "input": "hi", "instructions": "Be brief.", "max_output_tokens": 7, "temperature": 0.5, "stream": true,
            "store": true, "include": ["message.output_text.logprobs"], "truncation": "disabled", "background": false,
            "metadata": {"a": "b"}, "reasoning": {"effort": "none"}, "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        }))
        .unwrap();
        assert_eq!(
            (input.model.as_str(), input.max_tokens, asked.stream, asked.logprobs),
            ("m", Some(7), true, Some(0))
        );
        assert_eq!(input.wanted.as_ref().map(|wanted| wanted.constraint.text()), Some("{\"type\":\"object\"}"));
        let Prompt::Chat(messages, options) = &input.prompts[0] else { panic!("{input:?}") };
        assert_eq!(messages.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["system", "user"]);
        assert_eq!(options.get("enable_thinking"), Some(&json!(false)));
        let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}]);
        let (input, ..) =
            of(json!({"input": "hi", "tools": tools, "tool_choice": {"type": "function", "name": "f"}})).unwrap();
        let tools = input.tools.unwrap();
        assert_eq!((tools.choice, &tools.specs[0]["function"]["name"]), (crate::tools::Choice::Named(0), &json!("f")));
    }

    #[test]
    fn errors_name_the_fields_of_the_request() {
        let with = |extra: Value| {
            let mut body = json!({"input": "hi"});
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            of(body).unwrap_err()
        };
        for (body, param) in [
            (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"background": true}), "background"),
            (json!({"truncation": "auto"}), "truncation"),
            (json!({"messages": []}), "messages"),
            (json!({"n": 2}), "n"),
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function", "name": "not good"}]}), "tools[0].name"),
            (json!({"max_output_tokens": "x"}), "max_output_tokens"),
            (json!({"text": {"format": {"type": "json_schema", "schema": {}}}}), "text.format.name"),
            (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
            (json!({"text": "json"}), "text"),
            (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0]"),
            (json!({"instructions": "x", "input": [{"role": "wizard", "content": "x"}]}), "input[0].role"),
            (json!({"temperatur": 1}), "temperatur"),
        ] {
            let error = with(body.clone());
            assert_eq!(error.param.as_deref(), Some(param), "{body}: {error}");
            assert!(error.message.contains(param), "{error}");
        }
        assert_eq!(of(json!({})).unwrap_err().param.as_deref(), Some("input"));
    }
}

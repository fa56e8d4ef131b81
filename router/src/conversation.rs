//! A conversation over gRPC, with tools, as the chat that HTTP has: both have the same checks.

use baton_proto::v1;
use serde_json::{Value, json};

use crate::error::RequestError;
use crate::openai::{self, Embedded};
use crate::prompt::Prompt;
use crate::tools::Tools;

/// The prompt and the tools of a conversation.
pub(crate) fn read(chat: v1::Chat) -> Result<(Prompt, Option<Tools>), RequestError> {
    let v1::Chat { messages, tools, tool_choice, one_call, template_options } = chat;
    let mut embedded = Embedded::default();
    let mut object = |field: &str, text: &str| match embedded.read(field, text)? {
        Some(value @ Value::Object(_)) => Ok(value),
        _ => Err(RequestError::invalid(field, format!("{field} must be a JSON object"))),
    };
    let options = match template_options.is_empty() {
        true => Value::Null,
        false => object("chat.template_options", &template_options)?,
    };
    let mut specs = Vec::new();
    for (at, v1::Tool { name, description, parameters }) in tools.into_iter().enumerate() {
        let parameters = match parameters.is_empty() {
            true => Value::Null,
            false => object(&format!("chat.tools[{at}].parameters"), &parameters)?,
        };
        let mut function = json!({"name": name, "description": description, "parameters": parameters});
        if let Some(function) = function.as_object_mut() {
            function.retain(|_, value| !value.is_null() && value != "");
        }
        specs.push(json!({"type": "function", "function": function}));
    }
    let choice = tool_choice.unwrap_or_default();
    let choice = match (choice.mode(), choice.function.as_str()) {
        (_, name) if !name.is_empty() => json!({"type": "function", "function": {"name": name}}),
        (v1::ToolMode::Auto, _) => Value::Null,
        (v1::ToolMode::None, _) => "none".into(),
        (v1::ToolMode::Required, _) => "required".into(),
    };
    let messages: Vec<_> = messages.into_iter().map(message).collect();
    let body = json!({
        "messages": messages,
        "tools": specs,
        "tool_choice": choice,
        "parallel_tool_calls": !one_call,
        "chat_template_kwargs": options,
    });
    openai::conversation(&body).map_err(reworded)
}

fn message(message: v1::ChatMessage) -> Value {
    let v1::ChatMessage { role, content, tool_calls, tool_call_id, name, reasoning } = message;
    let some = |text: String| (!text.is_empty()).then_some(text);
    let call = |call: v1::ToolCall| json!({"id": some(call.id), "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
    let calls: Vec<_> = tool_calls.into_iter().map(call).collect();
    json!({
        "role": role,
        "content": content,
        "tool_calls": calls,
        "tool_call_id": some(tool_call_id),
        "name": some(name),
        "reasoning_content": some(reasoning),
    })
}

/// An error that names the fields of a chat over HTTP, with their names here.
fn reworded(error: RequestError) -> RequestError {
    let own = |text: &str| {
        let text = text.replace("].function.", "].");
        ["messages", "tools", "tool_choice"]
            .iter()
            .find_map(|name| {
                let rest =
                    text.strip_prefix(name).filter(|rest| rest.starts_with(['[', ' ', ':']) || rest.is_empty())?;
                Some(format!("chat.{name}{rest}"))
            })
            .unwrap_or(text)
    };
    RequestError { message: own(&error.message), param: error.param.as_deref().map(own), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Choice;

    fn hello() -> v1::Chat {
        let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), ..Default::default() };
        v1::Chat { messages: vec![message], ..Default::default() }
    }

    #[test]
    fn tools_and_their_calls_are_read() {
        let look = v1::Tool { name: "look".into(), parameters: "{\"type\": \"object\"}".into(), ..Default::default() };
        let call = v1::ToolCall { id: "c1".into(), name: "look".into(), arguments: "{\"at\": 1}".into() };
        let mut chat = v1::Chat { tools: vec![look], one_call: true, ..hello() };
        chat.messages.push(v1::ChatMessage { role: "assistant".into(), tool_calls: vec![call], ..Default::default() });
        chat.messages.push(v1::ChatMessage {
            role: "tool".into(),
            content: "sky".into(),
            tool_call_id: "c1".into(),
            ..Default::default()
        });
        let (prompt, tools) = read(chat.clone()).unwrap();
        let tools = tools.unwrap();
        assert_eq!((&tools.names[..], tools.choice, tools.parallel), (&["look".to_owned()][..], Choice::Auto, false));
        let Prompt::Chat(messages, _) = prompt else { panic!("{prompt:?}") };
        assert_eq!(messages[1].tool_calls[0].function.arguments, json!({"at": 1}));
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("c1"));
        for (mode, function, choice) in [
            (v1::ToolMode::Required, "", Some(Choice::Required)),
            (v1::ToolMode::Auto, "look", Some(Choice::Named(0))),
            (v1::ToolMode::None, "", None),
        ] {
            let tool_choice = Some(v1::ToolChoice { mode: mode.into(), function: function.into() });
            let (_, tools) = read(v1::Chat { tool_choice, ..chat.clone() }).unwrap();
            assert_eq!(tools.map(|tools| tools.choice), choice);
        }
    }

    #[test]
    fn errors_name_the_fields_of_the_message() {
        let tool = |name: &str, parameters: &str| v1::Chat {
            tools: vec![v1::Tool { name: name.into(), parameters: parameters.into(), ..Default::default() }],
            ..hello()
        };
        let mut wizard = hello();
        wizard.messages[0].role = "wizard".into();
        let named = v1::ToolChoice { function: "other".into(), ..Default::default() };
        for (chat, param) in [
            (v1::Chat::default(), "chat.messages"),
            (wizard, "chat.messages[0].role"),
            (tool("not good", ""), "chat.tools[0].name"),
            (tool("f", "[]"), "chat.tools[0].parameters"),
            (v1::Chat { tool_choice: Some(named), ..tool("f", "") }, "chat.tool_choice"),
            (v1::Chat { template_options: "5".into(), ..hello() }, "chat.template_options"),
        ] {
            let error = read(chat).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{error}");
            assert!(error.message.starts_with(param), "{error}");
        }
    }
}

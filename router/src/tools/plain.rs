//! Conversations with tools, for templates that know none: calls and results become text in the Hermes syntax.

use baton_model_text::ChatMessage;
use serde_json::json;

use super::{Choice, Tools};

/// The same conversation as text only. The system message describes `tools` and says that one must be called.
pub(crate) fn plain(messages: Vec<ChatMessage>, tools: Option<&Tools>) -> Vec<ChatMessage> {
    let mut all: Vec<ChatMessage> = messages.into_iter().map(without_tools).collect();
    if let Some(tools) = tools {
        let told = instruction(tools);
        match all.first_mut().filter(|first| first.role == "system") {
            Some(system) => system.content = format!("{}\n\n{told}", system.content),
            None => all.insert(0, ChatMessage::new("system", told)),
        }
    }
    all
}

fn without_tools(message: ChatMessage) -> ChatMessage {
    let ChatMessage { role, mut content, tool_calls, .. } = message;
    for call in tool_calls {
        let function = json!({"name": call.function.name, "arguments": call.function.arguments});
        let gap = if content.is_empty() { "" } else { "\n" };
        content = format!("{content}{gap}<tool_call>\n{function}\n</tool_call>");
    }
    match role.as_str() {
        "tool" => ChatMessage::new("user", format!("<tool_response>\n{content}\n</tool_response>")),
        _ => ChatMessage::new(role, content),
    }
}

fn instruction(tools: &Tools) -> String {
    let list: Vec<String> = tools.specs.iter().map(|spec| spec["function"].to_string()).collect();
    let which = match tools.choice {
        Choice::Named(at) => format!("Call the function {}.", tools.names[at]),
        Choice::Auto | Choice::Required => "Call the function that fits best.".to_owned(),
    };
    format!(
        "You can call these functions:\n{}\nAnswer with a call and nothing else, written as\n<tool_call>\n{{\"name\": \
         the function's name, \"arguments\": an object}}\n</tool_call>\n{which}",
        list.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_model_text::{FunctionCall, ToolCall};

    #[test]
    fn a_conversation_without_tools_stays_as_it_is() {
        let messages = vec![ChatMessage::new("system", "s"), ChatMessage::new("user", "u")];
        assert_eq!(plain(messages.clone(), None), messages);
    }

    #[test]
    fn calls_results_and_tools_become_text() {
        let function = FunctionCall { name: "f".into(), arguments: json!({"x": 1}) };
        let call = ToolCall { id: None, kind: "function".into(), function };
        let messages = vec![
            ChatMessage::new("user", "u"),
            ChatMessage { tool_calls: vec![call], ..ChatMessage::new("assistant", "Let me see.") },
            ChatMessage { tool_call_id: Some("1".into()), ..ChatMessage::new("tool", "42") },
        ];
        let specs = vec![json!({"type": "function", "function": {"name": "f"}})];
        let tools = Tools { specs, names: ["f".to_owned()].into(), choice: Choice::Named(0), parallel: true };
        let all = plain(messages, Some(&tools));
        let roles: Vec<_> = all.iter().map(|m| m.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(all[0].content.contains("{\"name\":\"f\"}") && all[0].content.ends_with("Call the function f."));
        assert_eq!(all[2].content, "Let me see.\n<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>");
        assert_eq!(all[3].content, "<tool_response>\n42\n</tool_response>");
    }
}

//! The grammar of an answer that must call: the model's own call syntax around the tools' schemas.

use baton_grammar::{json_rule, literal};
use baton_model_text::ToolSyntax;
use baton_types::Constraint;
use serde_json::json;

use super::{Choice, Tools};

/// A grammar that allows calls and nothing else. `marker` is the token id of the call marker, if that is a special token.
pub(crate) fn grammar(tools: &Tools, syntax: ToolSyntax, marker: Option<u32>) -> Constraint {
    let (arguments, after) = match syntax {
        ToolSyntax::Llama => ("parameters", "}"),
        ToolSyntax::Hermes | ToolSyntax::Mistral => ("arguments", "}"),
    };
    let mut rules = String::new();
    let mut names = Vec::new();
    for (at, (name, parameters)) in tools.callable().enumerate() {
        let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let before = format!("{{\"name\": {}, \"{arguments}\": ", json!(name));
        let schema = json_rule(parameters.unwrap_or(&nothing));
        rules += &format!("call{at}: {} {schema} {}\n", literal(&before), literal(after));
        names.push(format!("call{at}"));
    }
    // A named function means exactly one call.
    let many = tools.parallel && !matches!(tools.choice, Choice::Named(_));
    let marker = marker.map_or_else(|| literal(syntax.marker()), |id| format!("<[{id}]>"));
    let start = match syntax {
        ToolSyntax::Hermes => {
            let one = format!("{marker} {} call {}", literal("\n"), literal("\n</tool_call>"));
            if many { format!("start: one ({} one)*\none: {one}", literal("\n")) } else { format!("start: {one}") }
        }
        // Llama's template asks for one call.
        ToolSyntax::Llama => "start: call".to_owned(),
        ToolSyntax::Mistral => {
            let more = if many { format!("({} call)*", literal(", ")) } else { String::new() };
            format!("start: {marker} {} call {more} {}", literal(" ["), literal("]"))
        }
    };
    Constraint::Lark(format!("{start}\ncall: {}\n{rules}", names.join(" | ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(choice: Choice, parallel: bool) -> Tools {
        let spec =
            |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        let bare = json!({"type": "function", "function": {"name": "b"}});
        Tools { specs: vec![spec("a"), bare], names: ["a".to_owned(), "b".to_owned()].into(), choice, parallel }
    }

    #[test]
    fn only_what_may_be_called_is_in_it() {
        let text =
            |choice, parallel, syntax, marker| grammar(&tools(choice, parallel), syntax, marker).text().to_owned();
        let any = text(Choice::Required, true, ToolSyntax::Hermes, None);
        assert!(
            any.starts_with("start: one (\"\\n\" one)*\none: \"<tool_call>\" \"\\n\" call \"\\n</tool_call>\"\n"),
            "{any}"
        );
        assert!(any.contains("call: call0 | call1\n") && any.contains("call1: \"{\\\"name\\\": \\\"b\\\""), "{any}");
        let named = text(Choice::Named(1), true, ToolSyntax::Hermes, None);
        assert!(!named.contains(")*") && named.contains("call: call0\n") && !named.contains("\\\"a\\\""), "{named}");
        let mistral = text(Choice::Required, false, ToolSyntax::Mistral, Some(5));
        assert!(mistral.starts_with("start: <[5]> \" [\" call  \"]\"\n"), "{mistral}");
        let llama = text(Choice::Required, true, ToolSyntax::Llama, None);
        assert!(llama.starts_with("start: call\n") && llama.contains("\\\"parameters\\\": "), "{llama}");
    }
}

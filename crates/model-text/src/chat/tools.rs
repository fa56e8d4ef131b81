//! How a model writes function calls. It is recognised from the chat template, which renders past calls in the same form.

/// A family's way to write calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times, also after text: Hermes, Qwen.
    Hermes,
    /// The answer is `{"name": …, "parameters": {…}}`, maybe after `<|python_tag|>`: Llama 3.
    Llama,
    /// `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`: Mistral.
    Mistral,
}

impl ToolSyntax {
    /// The syntax of a template; None when it takes no tools, or writes calls in an unknown syntax.
    pub(super) fn of(template: &str) -> Option<ToolSyntax> {
        let has = |text: &str| template.contains(text);
        if !has("tools") {
            None
        } else if has("<tool_call>") && !has("<function=") {
            Some(ToolSyntax::Hermes)
        } else if has("[TOOL_CALLS]") && !has("[ARGS]") {
            Some(ToolSyntax::Mistral)
        } else if has("\"parameters\": ") && (has("<|python_tag|>") || has("<|eot_id|>")) {
            Some(ToolSyntax::Llama)
        } else {
            None
        }
    }

    /// The text that announces a call. For Llama it is optional.
    pub fn marker(self) -> &'static str {
        match self {
            ToolSyntax::Hermes => "<tool_call>",
            ToolSyntax::Llama => "<|python_tag|>",
            ToolSyntax::Mistral => "[TOOL_CALLS]",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_is_known_by_its_template() {
        let of = ToolSyntax::of;
        assert_eq!(of("{% if tools %}within <tool_call></tool_call>{% endif %}"), Some(ToolSyntax::Hermes));
        assert_eq!(of("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["), Some(ToolSyntax::Mistral));
        let llama = "{% if tools is not none %}{\"name\": function name, \"parameters\": dictionary}<|eot_id|>";
        assert_eq!(of(llama), Some(ToolSyntax::Llama));
        assert_eq!(of("{{ messages[0].content }}"), None);
        assert_eq!(of("{% if tools %}{{ tools }}{% endif %}"), None, "who knows how calls look");
        assert_eq!(of("{{ tools }}<tool_call><function=x>"), None, "calls in XML");
        assert_eq!(of("{{ tools }}[TOOL_CALLS]name[ARGS]{}"), None);
    }
}

//! A conversation: what was said so far, and what a line that was typed means. Pure.

use baton_proto::v1;

/// What is to be done with a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Typed {
    /// Ask the model.
    Ask,
    /// Tell the user this.
    Tell(String),
    /// Nothing was typed.
    Nothing,
    /// End the program.
    Quit,
}

/// The commands, for people.
pub const HELP: &str = "/clear begins anew, /system TEXT says who the model is (alone: nobody), /quit or Ctrl-D ends.\n\
                        Ctrl-C stops an answer. Up and down show lines from before.";

/// What was said so far.
#[derive(Debug, Default)]
pub struct Talk {
    system: Option<String>,
    messages: Vec<v1::ChatMessage>,
}

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content: content.to_owned(), ..Default::default() }
}

impl Talk {
    /// Nothing was said yet, but perhaps who the model is.
    pub fn new(system: Option<String>) -> Talk {
        Talk { system, messages: Vec::new() }
    }

    /// Takes in a line that was typed. A question becomes part of what was said.
    pub fn typed(&mut self, line: &str) -> Typed {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word {
            "" => Typed::Nothing,
            "/clear" => {
                self.messages.clear();
                Typed::Tell("The conversation begins anew.".to_owned())
            }
            "/system" => {
                let text = rest.trim();
                self.system = (!text.is_empty()).then(|| text.to_owned());
                Typed::Tell(
                    if text.is_empty() { "No system message from now on." } else { "The system message is set." }
                        .to_owned(),
                )
            }
            "/help" => Typed::Tell(HELP.to_owned()),
            "/quit" | "/exit" => Typed::Quit,
            // A question may name a path: only a word alone behind the slash is taken for a command.
            word if word.starts_with('/') && word[1..].chars().all(char::is_alphabetic) => {
                Typed::Tell(format!("There is no {word}. {HELP}"))
            }
            _ => {
                self.messages.push(message("user", line));
                Typed::Ask
            }
        }
    }

    /// All messages to send.
    pub fn messages(&self) -> Vec<v1::ChatMessage> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// The model said this, perhaps not to its end. Nothing: the question is forgotten, too.
    pub fn answered(&mut self, text: &str) {
        match text.is_empty() {
            true => drop(self.messages.pop()),
            false => self.messages.push(message("assistant", text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(talk: &Talk) -> Vec<String> {
        talk.messages().into_iter().map(|message| format!("{}: {}", message.role, message.content)).collect()
    }

    #[test]
    fn questions_and_answers_follow_each_other() {
        let mut talk = Talk::new(Some("be kind".to_owned()));
        assert_eq!(talk.typed("  hello "), Typed::Ask);
        talk.answered("hi");
        assert_eq!(talk.typed("again"), Typed::Ask);
        assert_eq!(said(&talk), ["system: be kind", "user: hello", "assistant: hi", "user: again"]);
        talk.answered("");
        assert_eq!(said(&talk).len(), 3, "a question without an answer is not repeated");
    }

    #[test]
    fn commands_are_no_questions() {
        let mut talk = Talk::default();
        assert_eq!((talk.typed(" "), talk.typed("/quit")), (Typed::Nothing, Typed::Quit));
        assert!(matches!(talk.typed("/system you are a cat"), Typed::Tell(_)));
        assert_eq!(talk.typed("/etc/hosts, what is it?"), Typed::Ask, "a path is no command");
        assert_eq!(said(&talk), ["system: you are a cat", "user: /etc/hosts, what is it?"]);
        talk.typed("/clear");
        assert_eq!(said(&talk), ["system: you are a cat"]);
        talk.typed("/system");
        assert!(said(&talk).is_empty());
        assert!(matches!(talk.typed("/sytem x"), Typed::Tell(told) if told.starts_with("There is no /sytem")));
        assert!(said(&talk).is_empty());
    }
}

//! GET /openapi.json: the HTTP API, described from the types that read and write it.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use super::tokens::{DetokenizeFields, Detokenized, TokenizeFields, Tokenized};
use super::types::{ChatFields, CommonFields, CompletionFields, ErrorBody, Model, ModelList};
use super::{object, responses};

/// The document, in OpenAPI 3.1.
pub(crate) fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let (reads, writes) = (settings.clone().into_generator(), settings.for_serialize().into_generator());
    let mut writer = Writer { reads, writes };
    let paths = writer.paths();
    let mut schemas = writer.reads.take_definitions(true);
    schemas.extend(writer.writes.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The OpenAI-compatible HTTP API. Fields that are not listed are skipped, refused by name where they would \
                change the answer, or taken for misspelt. The gRPC API describes itself by reflection.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "Where clients need API keys."}},
        },
        "security": [{}, {"key": []}],
    })
}

struct Writer {
    /// Schemas of requests: what may be left out of them.
    reads: SchemaGenerator,
    /// Schemas of answers: what may be missing in them.
    writes: SchemaGenerator,
}

impl Writer {
    fn paths(&mut self) -> Value {
        let (chat, text) = (self.both::<ChatFields>(), self.both::<CompletionFields>());
        let answer = object::schema(&mut self.writes).to_value();
        let (asks, response) = (responses::request_schema(&mut self.reads), responses::schema());
        let (tokenize, detokenize) = (self.read::<TokenizeFields>(), self.read::<DetokenizeFields>());
        let model = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}});
        json!({
            "/v1/chat/completions": {"post": self.generates("Answer a conversation", &chat, &answer)},
            "/v1/completions": {"post": self.generates("Continue a text", &text, &answer)},
            "/v1/responses": {"post": self.generates("Answer a conversation, in the newer form", &asks, &response)},
            "/v1/models": {"get": self.gets::<ModelList<'_>>("The models that are served")},
            "/v1/models/{id}": {"parameters": [model], "get": self.gets::<Model<'_>>("One model")},
            "/tokenize": {"post": self.posts::<Tokenized>("The token ids of a text or a conversation", &tokenize)},
            "/detokenize": {"post": self.posts::<Detokenized>("The text of token ids", &detokenize)},
            "/version": {"get": self.says("The version", &json!({"application/json": {"schema": {
                "type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}}}))},
            "/health": {"get": self.says("Whether the process lives", &json!({"text/plain": {"schema": {"type": "string"}}}))},
            "/ready": {"get": self.ready()},
            "/openapi.json": {"get": self.says("This document", &json!({"application/json": {"schema": {"type": "object"}}}))},
        })
    }

    fn read<T: JsonSchema>(&mut self) -> Value {
        self.reads.subschema_for::<T>().to_value()
    }

    fn written<T: JsonSchema>(&mut self) -> Value {
        self.writes.subschema_for::<T>().to_value()
    }

    /// A request's own fields and the common ones.
    fn both<T: JsonSchema>(&mut self) -> Value {
        json!({"allOf": [self.read::<T>(), self.read::<CommonFields>()]})
    }

    fn generates(&mut self, summary: &str, request: &Value, answer: &Value) -> Value {
        let content = json!({
            "application/json": {"schema": answer},
            "text/event-stream": {"schema": {"description": "With `stream: true`: an event for each chunk."}},
        });
        self.operation(summary, Some(request), content)
    }

    fn posts<T: JsonSchema>(&mut self, summary: &str, request: &Value) -> Value {
        let content = json!({"application/json": {"schema": self.written::<T>()}});
        self.operation(summary, Some(request), content)
    }

    fn gets<T: JsonSchema>(&mut self, summary: &str) -> Value {
        let content = json!({"application/json": {"schema": self.written::<T>()}});
        self.operation(summary, None, content)
    }

    /// What asks for nothing, and is not refused.
    fn says(&mut self, summary: &str, content: &Value) -> Value {
        let refused = self.error("Refused: the method, or the server has no room");
        json!({"summary": summary, "responses": {"200": {"description": "Yes", "content": content}, "4XX": refused}})
    }

    fn ready(&mut self) -> Value {
        let content = json!({"text/plain": {"schema": {"type": "string"}}});
        let mut ready = self.says("Whether requests can be served", &content);
        ready["responses"]["503"] = json!({"description": "No, and why", "content": content});
        ready
    }

    fn operation(&mut self, summary: &str, request: Option<&Value>, content: Value) -> Value {
        let mut operation = json!({
            "summary": summary,
            "responses": {
                "200": {"description": "The answer", "content": content},
                "4XX": self.error("Refused; `param` names the field at fault"),
                "5XX": self.error("It cannot be served now, or failed"),
            },
        });
        if let Some(request) = request {
            operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": request}}});
        }
        operation
    }

    fn error(&mut self, description: &str) -> Value {
        json!({"description": description, "content": {"application/json": {"schema": self.written::<ErrorBody>()}}})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reference in a value.
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = document();
        let mut all = Vec::new();
        references(&document, &mut all);
        assert!(all.len() > 20, "{all:?}");
        for reference in all {
            assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
        }
    }

    #[test]
    fn the_fields_that_are_read_are_described() {
        use super::super::fields::names;
        let document = document();
        let fields = |name: &str| document["components"]["schemas"][name]["properties"].as_object().unwrap().len();
        assert_eq!(fields("ChatFields"), names::<ChatFields>().len());
        assert_eq!(fields("CompletionFields"), names::<CompletionFields>().len());
        assert_eq!(fields("CommonFields"), names::<CommonFields>().len());
        assert_eq!(document["components"]["schemas"]["CommonFields"]["properties"]["temperature"]["maximum"], 100.0);
        let post = &document["paths"]["/v1/responses"]["post"];
        let response = &post["requestBody"]["content"]["application/json"]["schema"]["properties"];
        for name in names::<ChatFields>().iter().chain(names::<CommonFields>()) {
            assert_ne!(response.get(name).is_some(), responses::OTHERWISE.contains(name), "{name}");
        }
        assert_eq!(response["priority"]["maximum"], 536_870_911);
        assert!(response["tools"].get("maxItems").is_none(), "its own form");
    }
}

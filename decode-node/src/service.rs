//! The gRPC service `Decode.Generate`.

use std::sync::Arc;

use baton_cluster::Role;
use baton_engine::Start;
use baton_proto::v1::{self, decode_event::Event as Sent, decode_server};
use baton_roles::Decode;
use baton_roles::decode::Answer;
use baton_worker::{
    Commands, EngineHandle, Events, KvEnds, Moment, Node, NodeRole, Traced, Wire, WorkerError, scored, stream_status,
};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::role::{DecodeShell, Message};

/// Most tokens that a message has beside its first.
const MOST_TOGETHER: usize = 63;

pub(crate) struct DecodeNode {
    node: Node,
    engine: EngineHandle<Message>,
}

impl NodeRole for DecodeNode {
    type Shell = DecodeShell;
    const ROLE: Role = Role::Decode;

    fn role(node: &Node) -> Decode {
        Decode::new(node.config.kv_lease, node.vocab)
    }

    fn shell(node: &Node, _: Commands<Message>, ends: &Arc<KvEnds>) -> Result<DecodeShell, WorkerError> {
        ends.prepare(node)?;
        Ok(DecodeShell::new(Arc::clone(ends)))
    }

    fn routes(
        node: Node,
        engine: EngineHandle<Message>,
        _: Arc<KvEnds>,
        routes: &mut RoutesBuilder,
    ) -> Result<&'static str, WorkerError> {
        routes.add_service(decode_server::DecodeServer::new(DecodeNode { node, engine }));
        Ok(<decode_server::DecodeServer<DecodeNode> as tonic::server::NamedService>::NAME)
    }
}

#[tonic::async_trait]
impl decode_server::Decode for DecodeNode {
    type GenerateStream = Events<Self, Message>;

    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let (metadata, _, request) = request.into_parts();
        let sequence = request.sequence.ok_or_else(|| Status::invalid_argument("sequence is missing"))?;
        let traced = Traced::read(&metadata, "decode worker", &sequence.request_id);
        let joins = request.takes_more;
        let start = if request.compute_here { Start::Compute } else { Start::Receive };
        let new = Box::new(self.node.new_sequence(sequence, start).await?);
        let submit = |stream, accepted| Message::Generate { new, stream, accepted };
        let mut events = Events::open(&self.engine, Message::Cancel, traced, submit).await?;
        if joins {
            events.get_mut().join();
        }
        Ok(events)
    }
}

impl Wire for DecodeNode {
    type Item = Answer;
    type Event = v1::DecodeEvent;

    fn moment(answer: &Answer) -> Moment {
        match answer {
            Answer::Reserved(_) => Moment::Reserved,
            Answer::Token(_) => Moment::Token,
            _ => Moment::Other,
        }
    }

    fn event(answer: Answer) -> Result<(v1::DecodeEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Reserved(target) => Sent::Reserved(v1::Reserved { target }),
            Answer::Scored(tokens) => Sent::Scored(scored(tokens)),
            Answer::Token(token) => Sent::Token(token.into()),
            Answer::Started(cached_tokens) => Sent::Started(v1::Started { cached_tokens }),
            Answer::Arrived(bytes, seconds, transport) => {
                Sent::Arrived(v1::Transferred { bytes, seconds, transport: transport.as_str().to_owned() })
            }
            Answer::Finished(reason) => Sent::Finished(v1::Finished { reason: v1::FinishReason::from(reason).into() }),
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::DecodeEvent { event: Some(event), more: Vec::new() }, last))
    }

    fn join(event: &mut v1::DecodeEvent, answer: Answer) -> Option<Answer> {
        match (&event.event, &answer) {
            (Some(Sent::Token(first)), Answer::Token(token))
                if token.has_only_an_id()
                    && token.index as usize == first.index as usize + 1 + event.more.len()
                    && event.more.len() < MOST_TOGETHER =>
            {
                event.more.push(token.id);
                None
            }
            _ => Some(answer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{FinishReason, TokenOut};

    #[test]
    fn ids_go_with_a_token_and_nothing_else_does() {
        let token = |index| TokenOut { index, id: 100 + index, ..TokenOut::default() };
        let (mut first, _) = DecodeNode::event(Answer::Token(token(3))).unwrap();
        let scored = TokenOut { logprob: Some(-1.0), ..token(4) };
        for other in [Answer::Finished(FinishReason::Stop), Answer::Token(token(5)), Answer::Token(scored)] {
            assert_eq!(DecodeNode::join(&mut first, other.clone()), Some(other));
        }
        for index in 4..4 + MOST_TOGETHER as u32 {
            assert_eq!(DecodeNode::join(&mut first, Answer::Token(token(index))), None);
        }
        assert!(DecodeNode::join(&mut first, Answer::Token(token(67))).is_some(), "a message is bounded");
        assert!(first.more.into_iter().eq(104..167));
        let (mut started, _) = DecodeNode::event(Answer::Started(2)).unwrap();
        assert!(DecodeNode::join(&mut started, Answer::Token(token(0))).is_some());
    }
}

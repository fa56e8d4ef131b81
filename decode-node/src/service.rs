//! The gRPC service `Decode.Generate`.

use baton_cluster::Role;
use baton_engine::Start;
use baton_proto::v1::{self, decode_event::Event as Sent, decode_server};
use baton_roles::Decode;
use baton_roles::decode::Answer;
use baton_transfer::{Receiver, ReceiverOptions, TransportChoice};
use baton_worker::{
    Commands, EngineHandle, Events, Node, NodeRole, Wire, WorkerError, WorkerService, scored, stream_status,
};
use tonic::service::RoutesBuilder;
use tonic::{Request, Response, Status};

use crate::role::{DecodeShell, Message};

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

    fn shell(node: &Node, commands: Commands<Message>) -> Result<DecodeShell, WorkerError> {
        let options = ReceiverOptions {
            worker: node.id,
            tcp: node.config.transfer,
            advertise: node.config.advertise.clone(),
            geometry: node.geometry.clone(),
            pool: node.pool.clone(),
            ucx: node.config.ucx(),
            tls: node.transfer_tls(),
            sockets: node.config.transfer_sockets.clone(),
            cpus: node.config.transfer_cpus.0.clone(),
            limits: node.config.transfer_limits(),
            verify: true,
        };
        let on_event = Box::new(move |event| {
            // The engine thread outlives the receiver, except at the very end, when nobody needs the events.
            let _ = commands.send(Message::Received(event));
        });
        let receiver = Receiver::bind(options, on_event)?;
        if node.config.transport.0 == TransportChoice::Ucx {
            receiver.prepare_ucx()?;
        }
        Ok(DecodeShell::new(receiver))
    }

    fn routes(
        node: Node,
        engine: EngineHandle<Message>,
        _: WorkerService,
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
        let request = request.into_inner();
        let sequence = request.sequence.ok_or_else(|| Status::invalid_argument("sequence is missing"))?;
        let start = if request.compute_here { Start::Compute } else { Start::Receive };
        let new = Box::new(self.node.new_sequence(sequence, start).await?);
        Events::open(&self.engine, Message::Cancel, |stream, accepted| Message::Generate { new, stream, accepted })
            .await
    }
}

impl Wire for DecodeNode {
    type Item = Answer;
    type Event = v1::DecodeEvent;

    fn event(answer: Answer) -> Result<(v1::DecodeEvent, bool), Status> {
        let last = answer.is_last();
        let event = match answer {
            Answer::Reserved(target) => Sent::Reserved(v1::Reserved { target }),
            Answer::Scored(tokens) => Sent::Scored(scored(tokens)),
            Answer::Token(token) => Sent::Token(token.into()),
            Answer::Started(cached_tokens) => Sent::Started(v1::Started { cached_tokens }),
            Answer::Finished(reason) => Sent::Finished(v1::Finished { reason: v1::FinishReason::from(reason).into() }),
            Answer::Failed(kind, message) => return Err(stream_status(kind, message)),
        };
        Ok((v1::DecodeEvent { event: Some(event) }, last))
    }
}

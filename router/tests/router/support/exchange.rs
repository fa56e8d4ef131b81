//! How made-up workers move prefixes between each other.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use baton_proto::v1::{self, fetch_event, serve_event};
use futures::{StreamExt, stream};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::worker::Events;

/// How a worker takes, or gives, one prefix.
#[derive(Clone, Debug, Default)]
pub enum Exchanges {
    /// Works correctly.
    #[default]
    Work,
    /// Refuses.
    Refuse(Status),
    /// Says nothing until the router drops the stream. A worker that takes lends blocks first.
    Stall,
    /// Says nothing at all.
    Silent,
    /// Takes, but begins only after so long.
    Late(Duration),
}

/// What a worker does with prefixes. A prefix that it takes is there as soon as blocks are lent for it.
#[derive(Default)]
pub struct Prefixes {
    pub plan: Mutex<VecDeque<Exchanges>>,
    /// Prefixes that were asked for.
    pub taken: watch::Sender<Vec<v1::Prefix>>,
    pub given: watch::Sender<Vec<v1::ServeRequest>>,
    /// Prefixes that were to be loaded ahead of need.
    pub recalled: watch::Sender<Vec<v1::Prefix>>,
}

impl Prefixes {
    fn next(&self) -> Result<Exchanges, Status> {
        match self.plan.lock().unwrap().pop_front().unwrap_or_default() {
            Exchanges::Refuse(status) => Err(status),
            other => Ok(other),
        }
    }

    pub fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<Events<v1::FetchEvent>>, Status> {
        let prefix = request.into_inner().prefix.unwrap();
        let tokens = prefix.tokens.len() as u32 - 1;
        self.taken.send_modify(|taken| taken.push(prefix));
        let plan = self.next()?;
        let event = |event| Ok(v1::FetchEvent { event: Some(event) });
        let lent = event(fetch_event::Event::Reserved(v1::Reserved { target: b"here".to_vec() }));
        let here = event(fetch_event::Event::Fetched(v1::Fetched { tokens }));
        Ok(Response::new(match plan {
            Exchanges::Work => stream::iter([lent, here]).boxed(),
            Exchanges::Stall => stream::iter([lent]).chain(stream::pending()).boxed(),
            Exchanges::Late(time) => {
                let late = async move {
                    tokio::time::sleep(time).await;
                    stream::iter([lent, here])
                };
                stream::once(late).flatten().boxed()
            }
            _ => stream::pending().boxed(),
        }))
    }

    pub fn recall(&self, request: Request<v1::RecallRequest>) -> Result<Response<v1::RecallResponse>, Status> {
        self.recalled.send_modify(|recalled| recalled.extend(request.into_inner().prefix));
        Ok(Response::new(v1::RecallResponse {}))
    }

    pub fn serve(&self, request: Request<v1::ServeRequest>) -> Result<Response<Events<v1::ServeEvent>>, Status> {
        self.given.send_modify(|given| given.push(request.into_inner()));
        let event = Some(serve_event::Event::Transferred(v1::Transferred::default()));
        let said = stream::iter([Ok(v1::ServeEvent { event })]);
        Ok(Response::new(match self.next()? {
            Exchanges::Work => said.boxed(),
            _ => stream::pending().boxed(),
        }))
    }
}

//! `GET /v1/events`: a snapshot of the whole daemon each second, as server-sent events (WHATWG
//! HTML, section 9.2).
//!
//! Counters are collected once for all clients that receive events, and only while there are such
//! clients. A slow client skips snapshots and costs no memory: it has at most one event in flight,
//! and gets the latest snapshot next. A client is disconnected if it takes no event for
//! [`SLOW_MAX`].

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::Body as HttpBody;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use hob_control::{Problem, Snapshot, without_error_numbers};
use hyper::body::{Body, Bytes, Frame};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::MissedTickBehavior;

use super::extract::Answer;
use super::listener::HangUp;
use crate::background::spawn;
use crate::services::Services;

/// Interval between two events.
const EVERY: Duration = Duration::from_secs(1);

/// Maximum number of clients that receive events on one socket: far below its maximum number of
/// connections, so that other clients can still connect.
const CLIENTS_MAX: usize = 16;

/// Time after which a client that reads no event is disconnected.
const SLOW_MAX: Duration = Duration::from_secs(15);

/// Sends events to all clients that receive events.
#[derive(Debug)]
pub(super) struct EventBroadcaster {
    services: Arc<Services>,
    places: Arc<Semaphore>,
    /// The latest event; `None` while no client receives events.
    news: watch::Sender<Option<Bytes>>,
    is_gathering: Mutex<bool>,
}

impl EventBroadcaster {
    /// Creates a broadcaster without clients.
    pub(super) fn new(services: Arc<Services>) -> Arc<EventBroadcaster> {
        Arc::new(EventBroadcaster {
            services,
            places: Arc::new(Semaphore::new(CLIENTS_MAX)),
            news: watch::Sender::new(None),
            is_gathering: Mutex::new(false),
        })
    }

    /// Subscribes to later events. The collection of snapshots begins with the first client.
    fn listen(self: &Arc<Self>) -> watch::Receiver<Option<Bytes>> {
        let mut is_gathering = self.is_gathering.lock().unwrap_or_else(PoisonError::into_inner);
        let news = self.news.subscribe();
        if !*is_gathering {
            *is_gathering = true;
            spawn(Arc::clone(self).gather());
        }
        news
    }

    async fn gather(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 1_u64.. {
            ticks.tick().await;
            if self.is_alone() {
                return;
            }
            let event = event(number, &self.services.observe.snapshot().await);
            self.news.send_replace(Some(event));
        }
    }

    /// Returns true if no client reads the events any more, and then ends the collection of
    /// snapshots.
    fn is_alone(&self) -> bool {
        let mut is_gathering = self.is_gathering.lock().unwrap_or_else(PoisonError::into_inner);
        if self.news.receiver_count() > 0 {
            return false;
        }
        self.news.send_replace(None);
        *is_gathering = false;
        true
    }
}

fn event(number: u64, snapshot: &Snapshot) -> Bytes {
    // JSON has no line breaks, so it is one line of data.
    let data = serde_json::to_string(snapshot).unwrap_or_default();
    let data = without_error_numbers(&data);
    Bytes::from(format!("event: snapshot\nid: {number}\ndata: {data}\n\n"))
}

/// Sends the state of the daemon once a second: server-sent events called `snapshot`, each with a
/// number as its id and a `Snapshot` as its data. A slow client gets fewer events. The number of
/// clients that receive events is limited; above the limit the response is 503.
#[utoipa::path(
    get,
    path = "/v1/events",
    responses(
        (status = 200, description = "An endless stream of events", content_type = "text/event-stream", body = Snapshot),
        (status = 503, description = "The maximum number of clients receives events already", body = Problem)
    )
)]
pub(super) async fn events(
    Extension(broadcaster): Extension<Arc<EventBroadcaster>>,
    hang_up: Option<Extension<HangUp>>,
) -> Response {
    let Ok(place) = Arc::clone(&broadcaster.places).try_acquire_owned() else {
        let problem = Problem::new(format!(
            "{CLIENTS_MAX} clients receive events on this socket already, which is the maximum"
        ))
        .with_hint("close a dashboard, or try again later");
        return Answer::<()>::No(StatusCode::SERVICE_UNAVAILABLE, problem).into_response();
    };
    let (sender, events) = mpsc::channel(1);
    spawn(pass_on(broadcaster.listen(), sender, hang_up.map(|Extension(it)| it), place));
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    (headers, HttpBody::new(Events(events))).into_response()
}

/// Sends the latest event to a client whenever the client has taken the previous one.
async fn pass_on(
    mut news: watch::Receiver<Option<Bytes>>,
    sender: mpsc::Sender<Bytes>,
    hang_up: Option<HangUp>,
    _place: OwnedSemaphorePermit,
) {
    // The client has not received the latest event yet, so this event is sent first.
    news.mark_changed();
    loop {
        tokio::select! {
            changed = news.changed() => if changed.is_err() { return },
            () = sender.closed() => return,
        }
        let Some(event) = news.borrow_and_update().clone() else { continue };
        match tokio::time::timeout(SLOW_MAX, sender.send(event)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => {
                tracing::info!(
                    "closing an events connection: the client has read no event for {} s",
                    SLOW_MAX.as_secs()
                );
                hang_up.iter().for_each(HangUp::now);
                return;
            }
        }
    }
}

/// The body of a response: events as they occur.
struct Events(mpsc::Receiver<Bytes>);

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
    }
}

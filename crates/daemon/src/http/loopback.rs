//! The dashboard of a daemon that listens on a Unix socket, which browsers cannot open (`hob
//! dashboard`). An HTTP listener on this host's loopback addresses forwards requests to the daemon.
//!
//! Other users of the host can reach the listener. Therefore all requests except those for the page
//! require a token, and other web sites are refused, as over TCP. Method, path and body are
//! forwarded with the rights of the user who runs the command.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, IF_NONE_MATCH};
use axum::http::{HeaderName, StatusCode};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use hob_control::Problem;
use hob_control::client::{Client, ClientError};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::auth::{self, Access};
use super::browser::{self, Names};
use super::extract::Answer;
use super::listener::{CONNECTIONS_MAX, connection};
use crate::background::spawn;
use crate::config::Role;
use crate::half_open::HalfOpenConnections;
use crate::watchdog::contained_task;

/// Headers of the browser that are forwarded.
const PASSED_ON: [HeaderName; 4] =
    [ACCEPT, CONTENT_TYPE, IF_NONE_MATCH, HeaderName::from_static("x-request-id")];

/// Headers that apply to one connection only.
const HOP_BY_HOP: [&str; 4] = ["connection", "keep-alive", "transfer-encoding", "upgrade"];

/// A bound listener.
#[derive(Debug)]
pub struct Loopback {
    socket: TcpListener,
    token: String,
    role: Role,
}

impl Loopback {
    /// Binds a port of the loopback address; 0 selects a free port. Creates a token. Clients that
    /// send this token get the role `role`.
    pub async fn bind(port: u16, role: Role) -> io::Result<Loopback> {
        let mut secret = [0; 24];
        ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut secret)
            .map_err(|_| io::Error::other("no random numbers"))?;
        let token = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Loopback { socket: TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?, token, role })
    }

    /// Returns the address of the page.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the URL of the page, with the token behind `#`. Browsers do not send the part of a
    /// URL behind `#`.
    pub fn url(&self) -> io::Result<String> {
        Ok(format!("http://{}/#token={}", self.address()?, self.token))
    }

    /// Serves requests until dropped.
    pub async fn serve(self, client: Client) {
        let access = Arc::new(Access::of_token("the dashboard's token", &self.token, self.role));
        let router = Router::new()
            .fallback(pass_on)
            .with_state(client)
            .layer(middleware::from_fn_with_state(access, auth::check))
            .layer(middleware::from_fn_with_state(Names::Loopback, browser::check));
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let half_open = HalfOpenConnections::default();
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            match self.socket.accept().await {
                Ok((stream, _)) => {
                    let _ = stream.set_nodelay(true);
                    let served = connection(stream, router.clone(), None, place, half_open.enter());
                    spawn(contained_task(true, served));
                }
                // The usual reason is a lack of descriptors: wait until some are closed.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
    }
}

async fn pass_on(State(client): State<Client>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, super::BODY_BYTES_MAX).await else {
        let most = hob_control::Size(super::BODY_BYTES_MAX as u64).human();
        let why = format!("a request body has at most {most}");
        return Answer::no(StatusCode::PAYLOAD_TOO_LARGE, why).into_response();
    };
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut passed_on = Vec::new();
    for name in PASSED_ON {
        passed_on.extend(head.headers.get(&name).map(|value| (name.clone(), value.clone())));
    }
    match client.forward(head.method, path, passed_on, body).await {
        Ok(answer) => {
            let (mut head, body) = answer.into_parts();
            HOP_BY_HOP.iter().for_each(|name| drop(head.headers.remove(*name)));
            Response::from_parts(head, axum::body::Body::new(body))
        }
        Err(error) => {
            let status = match error {
                ClientError::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
                _ => StatusCode::BAD_GATEWAY,
            };
            Answer::<()>::No(status, Problem::new(error.to_string())).into_response()
        }
    }
}

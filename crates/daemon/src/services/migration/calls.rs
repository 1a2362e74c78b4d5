//! Encodes the HTTP calls that the source of a migration sends to the destination, and the
//! destination's answers. A message of the migration state machine becomes a URL path and a body.

use hob_control::{CallAnswer, CallRefusal, CarrySession};
use hob_engine::migration::{Answer, Call, Refusal, Session, View, heat};

/// Maximum body size in bytes of a call in which the source lists changed ranges.
pub(crate) const CHANGED_BYTES_MAX: usize = 16 << 20;

/// Upper bound of valid generation numbers.
const GENERATION_MAX: u64 = 1 << 48;

/// Returns the name that a call of the source has in its URL path.
pub(super) fn name(call: &Call) -> &'static str {
    match call {
        Call::Arrive => "arrive",
        Call::Changed(_) => "changed",
        Call::Yours => "yours",
        Call::Cancel => "cancel",
        Call::Look => "look",
    }
}

/// Encodes ranges of sectors in pages. Each page is preceded by its length.
pub(super) fn encode_ranges(ranges: &[(u64, u64)]) -> Vec<u8> {
    let mut body = Vec::new();
    for some in ranges.chunks(heat::RANGES_MAX) {
        let page = heat::encode(some);
        body.extend((page.len() as u32).to_le_bytes());
        body.extend(page);
    }
    body
}

/// Decodes ranges of a disk that has `sectors` sectors. Cuts the last range at the end of the disk.
pub(super) fn decode_ranges(mut body: &[u8], sectors: u64) -> Result<Vec<(u64, u64)>, heat::Nonsense> {
    let mut ranges = Vec::new();
    while !body.is_empty() {
        let (length, rest) = body.split_first_chunk::<4>().ok_or(heat::Nonsense)?;
        let (page, rest) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(heat::Nonsense)?;
        let decoded = heat::decode(page, u64::MAX / 4096)?;
        ranges.extend(
            decoded
                .into_iter()
                .map(|(first, end)| (first, end.min(sectors)))
                .filter(|(first, end)| first < end),
        );
        body = rest;
    }
    Ok(ranges)
}

/// Returns the session that a call of the source names, if the generation and the lineage are
/// valid.
pub(crate) fn session(of: &CarrySession) -> Option<Session> {
    let is_lineage = of.lineage.len() == 32 && of.lineage.bytes().all(|byte| byte.is_ascii_hexdigit());
    (of.generation < GENERATION_MAX && is_lineage)
        .then_some(Session { generation: of.generation, attempt: of.attempt })
}

/// Converts an answer of the destination for the source's state machine. Also returns the reason of
/// a refusal.
pub(super) fn answer(answer: &CallAnswer) -> (Answer, Option<String>) {
    let CallAnswer { wants, done, pulled_bytes, left_bytes, .. } = *answer;
    match &answer.refused {
        None => (Ok(View { wants, done, pulled_bytes, left_bytes }), None),
        Some(CallRefusal::NotAwaited) => {
            (Err(Refusal::NotAwaited), Some("the other host does not wait for the disk any more".to_owned()))
        }
        Some(CallRefusal::Owner { generation }) => (
            Err(Refusal::Owner(*generation)),
            Some("the other host owns another disk with this name".to_owned()),
        ),
        Some(CallRefusal::Failed { why }) => (Err(Refusal::Failed), Some(format!("the other host: {why}"))),
        Some(CallRefusal::Never { why }) => (Err(Refusal::Never), Some(format!("the other host: {why}"))),
    }
}

/// Converts the destination's answer to the form that is sent to the source.
pub(super) fn to_wire(answer: Answer, why: Option<String>) -> CallAnswer {
    let view = answer.unwrap_or_default();
    let why = why.unwrap_or_else(|| {
        "the other host could not execute the request; its log may show the reason".to_owned()
    });
    let refused = answer.err().map(|error| match error {
        Refusal::NotAwaited => CallRefusal::NotAwaited,
        Refusal::Owner(generation) => CallRefusal::Owner { generation },
        Refusal::Failed => CallRefusal::Failed { why },
        Refusal::Never => CallRefusal::Never { why },
    });
    CallAnswer {
        refused,
        wants: view.wants,
        done: view.done,
        pulled_bytes: view.pulled_bytes,
        again_bytes: 0,
        left_bytes: view.left_bytes,
        page: None,
        ranges: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_decoded_and_invalid_input_is_refused() {
        let ranges: Vec<(u64, u64)> = (0..10_000).map(|i| (i * 4, i * 4 + 2)).collect();
        let body = encode_ranges(&ranges);
        assert!(body.len() < 3 * ranges.len());
        assert_eq!(decode_ranges(&body, 40_000).unwrap(), ranges);
        assert_eq!(decode_ranges(&body, 5).unwrap(), [(0, 2), (4, 5)], "the last region may be past the end");
        assert_eq!(decode_ranges(&[], 5).unwrap(), []);
        for cut in [1, 3, 5, body.len() - 1] {
            assert!(decode_ranges(&body[..cut], 40_000).is_err(), "{cut}");
        }
        assert!(decode_ranges(&[255, 255, 255, 255, 0], 5).is_err());
    }

    #[test]
    fn invalid_sessions_are_refused() {
        let lineage = "0123456789abcdef0123456789ABCDEF".to_owned();
        let good = CarrySession { generation: 3, attempt: 1, lineage };
        assert_eq!(session(&good), Some(Session { generation: 3, attempt: 1 }));
        assert_eq!(session(&CarrySession { generation: u64::MAX, ..good.clone() }), None);
        assert_eq!(session(&CarrySession { lineage: "x".repeat(32), ..good }), None);
    }

    #[test]
    fn answers_survive_the_way() {
        let view = View { wants: true, done: false, pulled_bytes: 7, left_bytes: 9 };
        for sent in [
            Ok(view),
            Err(Refusal::NotAwaited),
            Err(Refusal::Owner(4)),
            Err(Refusal::Failed),
            Err(Refusal::Never),
        ] {
            assert_eq!(answer(&to_wire(sent, None)).0, sent);
        }
    }
}

//! The common name in a certificate's subject (RFC 5280, section 4.1; DER of X.690).
//!
//! The name is read only from certificates whose signature TLS has verified, so their encoding is
//! valid. For an invalid encoding, no name is returned. A subject with two common names counts as
//! one without a common name, because it is unknown which of the names the CA has checked.

const INTEGER: u8 = 0x02;
const OBJECT_ID: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// DER tag of a certificate's version field, `[0] EXPLICIT Version`.
const VERSION: u8 = 0xa0;

/// DER content of the common name's object identifier, 2.5.4.3.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// Returns the subject's common name, if it has exactly one.
pub(super) fn common_name(certificate: &[u8]) -> Option<String> {
    let (certificate, _) = item(certificate, SEQUENCE)?;
    let (mut rest, _) = item(certificate, SEQUENCE)?;
    if let Some((_, after)) = item(rest, VERSION) {
        rest = after;
    }
    // Skips serial number, signature algorithm, issuer and validity.
    for tag in [INTEGER, SEQUENCE, SEQUENCE, SEQUENCE] {
        rest = item(rest, tag)?.1;
    }
    let (mut subject, _) = item(rest, SEQUENCE)?;
    let mut found = None;
    while !subject.is_empty() {
        let (mut set, after) = item(subject, SET)?;
        subject = after;
        while !set.is_empty() {
            let (attribute, after) = item(set, SEQUENCE)?;
            set = after;
            let (kind, value) = item(attribute, OBJECT_ID)?;
            if kind == COMMON_NAME && found.replace(text(value)?).is_some() {
                return None;
            }
        }
    }
    found
}

fn text(value: &[u8]) -> Option<String> {
    let (bytes, _) = [UTF8_STRING, PRINTABLE_STRING, IA5_STRING].iter().find_map(|tag| item(value, *tag))?;
    Some(std::str::from_utf8(bytes).ok()?.to_owned())
}

/// Returns the content of the first item, if it has this tag, and the bytes after the item.
fn item(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&length, rest) = rest.split_first()?;
    if found != tag {
        return None;
    }
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length - 0x80))?;
            (digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    fn certificate(parts: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["other.example".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn the_name_is_found_among_others() {
        let all = [
            (DnType::CountryName, "DE"),
            (
                DnType::OrganizationName,
                "an organisation with a name longer than fits into one byte of length",
            ),
            (DnType::CommonName, "höst 7"),
            (DnType::OrganizationalUnitName, "x"),
        ];
        assert_eq!(common_name(&certificate(&all)).as_deref(), Some("höst 7"));
        assert_eq!(common_name(&certificate(&all[..2])), None);
        assert_eq!(common_name(&certificate(&[])), None);
    }

    #[test]
    fn two_names_are_none() {
        let one = certificate(&[(DnType::CommonName, "aa"), (DnType::CustomDnType(vec![2, 5, 4, 65]), "bb")]);
        assert_eq!(common_name(&one).as_deref(), Some("aa"));
        // Changes the object identifier of the pseudonym to that of the common name.
        let mut two = one.clone();
        let at = two.windows(5).rposition(|w| w == [0x06, 0x03, 0x55, 0x04, 65]).unwrap();
        two[at + 4] = 0x03;
        assert_eq!(common_name(&two), None);
    }

    #[test]
    fn truncated_or_damaged_certificates_never_panic() {
        let whole = certificate(&[(DnType::CommonName, "name")]);
        for end in 0..whole.len() {
            let _ = common_name(&whole[..end]);
        }
        for at in 0..whole.len().min(300) {
            for value in [0, 0x7f, 0x80, 0x84, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let _ = common_name(&damaged);
            }
        }
    }
}

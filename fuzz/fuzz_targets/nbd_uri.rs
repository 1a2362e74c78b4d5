//! Fuzzes NBD URIs. A valid URI prints as a URI that parses to the same value.
#![no_main]

use hob_nbd::NbdUri;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: (u8, &str)| {
    let (scheme, rest) = data;
    let scheme = ["", "nbd://", "nbd+unix://", "nbd+unix:///?socket="][usize::from(scheme % 4)];
    if let Ok(uri) = format!("{scheme}{rest}").parse::<NbdUri>() {
        let printed = uri.to_string();
        assert_eq!(printed.parse(), Ok(uri), "{printed}");
    }
});

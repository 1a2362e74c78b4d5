//! Tests which URIs are accepted or refused, and the text that an accepted URI prints.

use hob_nbd::NbdUri;
use hob_nbd::uri::{Address, Credentials, UriError, UriTls};

fn tcp(host: &str, port: u16, export: &str) -> NbdUri {
    NbdUri::new(Address::Tcp { host: host.into(), port }, export)
}

fn unix(path: &str, export: &str) -> NbdUri {
    NbdUri::new(Address::Unix { path: path.into() }, export)
}

fn with_certificates(plain: NbdUri, directory: &str, hostname: Option<&str>) -> NbdUri {
    let credentials = Credentials::Certificates(directory.into());
    NbdUri { tls: Some(UriTls { credentials, hostname: hostname.map(str::to_owned) }), ..plain }
}

fn with_key(plain: NbdUri, file: &str, user: &str) -> NbdUri {
    let credentials = Credentials::PreSharedKey { file: file.into(), user: user.into() };
    NbdUri { tls: Some(UriTls { credentials, hostname: None }), ..plain }
}

#[test]
fn accepted() {
    for (text, want, printed) in [
        ("nbd://host", tcp("host", 10809, ""), "nbd://host"),
        ("nbd://host/", tcp("host", 10809, ""), "nbd://host"),
        ("nbd://host/disk", tcp("host", 10809, "disk"), "nbd://host/disk"),
        ("NBD://host:/disk", tcp("host", 10809, "disk"), "nbd://host/disk"),
        ("nbd://host:10809/a/b", tcp("host", 10809, "a/b"), "nbd://host/a/b"),
        ("nbd://host:1//abs", tcp("host", 1, "/abs"), "nbd://host:1//abs"),
        ("nbd://10.0.0.1:65535/x?", tcp("10.0.0.1", 65535, "x"), "nbd://10.0.0.1:65535/x"),
        ("nbd://[::1]", tcp("::1", 10809, ""), "nbd://[::1]"),
        ("nbd://[fe80::1%25eth0]:99/x", tcp("fe80::1%eth0", 99, "x"), "nbd://[fe80::1%25eth0]:99/x"),
        (
            "nbd://h/sp%20ace%2F%c3%A9+%3F%23",
            tcp("h", 10809, "sp ace/é+?#"),
            "nbd://h/sp%20ace/%C3%A9+%3F%23",
        ),
        ("nbd+unix:///?socket=/run/nbd", unix("/run/nbd", ""), "nbd+unix:///?socket=/run/nbd"),
        ("nbd+unix://?socket=s", unix("s", ""), "nbd+unix:///?socket=s"),
        ("nbd+unix:///d%26?socket=/a%26b", unix("/a&b", "d&"), "nbd+unix:///d%26?socket=/a%26b"),
        ("nbd+unix:///d?&socket=a=b&", unix("a=b", "d"), "nbd+unix:///d?socket=a=b"),
        (
            "nbds://h/x?tls-certificates=/etc/pki",
            with_certificates(tcp("h", 10809, "x"), "/etc/pki", None),
            "nbds://h/x?tls-certificates=/etc/pki",
        ),
        (
            "nbds+unix:///x?tls-hostname=array.example&tls-certificates=p&socket=s",
            with_certificates(unix("s", "x"), "p", Some("array.example")),
            "nbds+unix:///x?socket=s&tls-certificates=p&tls-hostname=array.example",
        ),
        (
            "nbds://ho%40st@[::1]:7?tls-psk-file=/k",
            with_key(tcp("::1", 7, ""), "/k", "ho@st"),
            "nbds://ho%40st@[::1]:7?tls-psk-file=/k",
        ),
        (
            "nbds+unix://me@/x?socket=s&tls-psk-file=k",
            with_key(unix("s", "x"), "k", "me"),
            "nbds+unix://me@/x?socket=s&tls-psk-file=k",
        ),
    ] {
        let parsed: NbdUri = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(parsed, want, "{text}");
        assert_eq!(parsed.to_string(), printed, "{text}");
        assert_eq!(printed.parse(), Ok(want), "{printed}");
    }
}

#[test]
fn refused() {
    use UriError::*;
    let s = str::to_owned;
    let long_name = format!("nbd://h/{}", "x".repeat(4097));
    let long_path = format!("nbd+unix:///?socket={}", "x".repeat(108));
    for (text, want) in [
        ("", Scheme(s(""))),
        ("/dev/nbd0", Scheme(s("/dev/nbd0"))),
        ("http://host/x", Scheme(s("http://host/x"))),
        ("nbd:host:10809", Scheme(s("nbd:host:10809"))),
        ("nbds://host/x", NoCredentials(s("nbds"))),
        ("nbds+unix:///x?socket=s", NoCredentials(s("nbds+unix"))),
        ("nbds://host/x?tls-psk-file=k", NoCredentials(s("nbds"))),
        ("nbds://user@host/x?tls-certificates=d", TwoCredentials),
        ("nbds://user@host/x?tls-certificates=d&tls-psk-file=k", TwoCredentials),
        ("nbds://host/x?tls-certificates=d&tls-certificates=e", Parameter(s("tls-certificates=e"))),
        ("nbd://host/x?tls-certificates=d", Parameter(s("tls-certificates=d"))),
        ("nbd+vsock://2/x", Vsock(s("nbd+vsock"))),
        ("nbd:///x", NoHost),
        ("nbd://:10809/x", NoHost),
        ("nbd://user@host/x", User),
        ("nbd://ho st/x", Host(s("ho st"))),
        ("nbd://::1/x", Host(s("::1"))),
        ("nbd://[::1/x", Host(s("[::1"))),
        ("nbd://[host]/x", Host(s("[host]"))),
        ("nbd://[::1%25]/x", Host(s("[::1%25]"))),
        ("nbd://[::1]99/x", Host(s("[::1]99"))),
        ("nbd://h%0a/x", Host(s("h%0a"))),
        ("nbd://h:0/x", Port(s("0"))),
        ("nbd://h:65536/x", Port(s("65536"))),
        ("nbd://h:+1/x", Port(s("+1"))),
        ("nbd://h:port/x", Port(s("port"))),
        ("nbd://h/x?socket=/s", Parameter(s("socket=/s"))),
        ("nbd://h/x#part", Fragment),
        ("nbd://h/%", Percent),
        ("nbd://h/%4", Percent),
        ("nbd://h/%zz", Percent),
        ("nbd://h/%ff", NotText),
        ("nbd://h/a%00b", NotText),
        (&long_name, TooLong),
        ("nbd+unix://host/x?socket=/s", UnixHost),
        ("nbd+unix:///x", NoSocket),
        ("nbd+unix:///x?socket=", SocketLength),
        (&long_path, SocketLength),
        ("nbd+unix:///x?socket=a&socket=b", Parameter(s("socket=b"))),
        ("nbd+unix:///x?socket=a&tls-psk-file=b", Parameter(s("tls-psk-file=b"))),
        ("nbd+unix:///x?socket", Parameter(s("socket"))),
    ] {
        assert_eq!(text.parse::<NbdUri>(), Err(want), "{text}");
    }
}

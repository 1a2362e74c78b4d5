//! Object stores of cloud providers as backings: `s3://BUCKET/PREFIX`, `gs://` and `az://`. The
//! code is a separate crate, because its libraries are large and hob can be built without them.
//!
//! Options of an address follow a question mark. Keys and passwords are read from the environment,
//! never from the address, because hob shows and stores addresses.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

/// Words in option names that mark a secret.
const SECRETS: [&str; 4] = ["key", "secret", "token", "password"];

/// Maximum number of times that the object store library repeats a failed request. More repetitions
/// would hide the store's errors from hob, which repeats requests itself and reports the last error
/// of an outage.
const RETRIES_MAX: usize = 2;

/// Longest pause before the object store library repeats a failed request.
const BACKOFF_MAX: Duration = Duration::from_millis(200);

/// Makes this process accept the addresses `s3://`, `gs://` and `az://` as backings.
pub fn install() {
    // The object store library uses the process-wide TLS crypto provider. All other code names the
    // same provider explicitly.
    let _ = rustls::crypto::ring::default_provider().install_default();
    hob_storage::backing::objects::install_clouds(find);
}

macro_rules! build {
    ($builder:ty, $url:expr, $options:expr) => {{
        let mut builder = <$builder>::from_env().with_url($url).with_retry(retries());
        for (name, value) in $options {
            let key = name.parse().map_err(|_| format!("there is no option {name:?}"))?;
            builder = builder.with_config(key, value);
        }
        Arc::new(builder.build().map_err(|error| error.to_string())?) as Arc<dyn ObjectStore>
    }};
}

/// Returns the object store that an address names, and the path of the disk in this store. The
/// error is a text for users.
fn find(spec: &str) -> Result<(Arc<dyn ObjectStore>, Path), String> {
    let (url, options) = spec.split_once('?').unwrap_or((spec, ""));
    let (scheme, rest) = url.split_once("://").ok_or("the URL has no scheme")?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    if bucket.is_empty() || prefix.is_empty() {
        return Err(format!("the URL must name a bucket and a prefix: {scheme}://BUCKET/PREFIX"));
    }
    let prefix = Path::parse(prefix).map_err(|error| error.to_string())?;
    let options = parse_options(options)?;
    let url = format!("{scheme}://{bucket}");
    let store = match scheme {
        "s3" => build!(AmazonS3Builder, url, options),
        "gs" => build!(GoogleCloudStorageBuilder, url, options),
        _ => build!(MicrosoftAzureBuilder, url, options),
    };
    Ok((store, prefix))
}

/// Returns the settings by which the object store library repeats failed requests.
fn retries() -> RetryConfig {
    let backoff = BackoffConfig { max_backoff: BACKOFF_MAX, ..BackoffConfig::default() };
    RetryConfig { backoff, max_retries: RETRIES_MAX, ..RetryConfig::default() }
}

fn parse_options(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut options = Vec::new();
    for option in text.split('&').filter(|option| !option.is_empty()) {
        let (name, value) =
            option.split_once('=').ok_or(format!("{option:?} does not have the form OPTION=VALUE"))?;
        let name = name.to_ascii_lowercase();
        if SECRETS.iter().any(|secret| name.contains(secret)) {
            return Err(format!(
                "{name} must be set in the environment, because hob shows and stores the \
                address of a backing"
            ));
        }
        options.push((name, value.to_owned()));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_have_options_and_no_secrets() {
        install();
        let spec = "s3://bucket/vms/disk1/?endpoint=http://127.0.0.1:9&allow_http=true&region=eu-1";
        let (_, prefix) = find(spec).unwrap();
        assert_eq!(prefix.as_ref(), "vms/disk1");
        for spec in [
            "s3://bucket",
            "s3://bucket/",
            "s3:///prefix",
            "s3://bucket/a//b",
            "s3://bucket/a?region",
            "s3://bucket/a?no_such_option=1",
            "s3://bucket/a?aws_secret_access_key=hunter2",
            "s3://bucket/a?token=x",
        ] {
            let error = find(spec).expect_err(spec);
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}

//! Extracts the messages of failed tests from a test runner's output, so that they can be printed at the
//! end of a long run.

/// Maximum number of lines per run. The first failures are the most important.
const LINES_MAX: usize = 150;

/// Collects libtest's `failures:` sections, line by line.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    inside: bool,
    in_backtrace: bool,
    kept: Vec<String>,
    left_out: usize,
}

impl Failures {
    /// Handles the next line of the test runner.
    pub(crate) fn take(&mut self, line: &str) {
        if line == "failures:" {
            self.inside = true;
        }
        if !self.inside {
            return;
        }
        self.inside = !line.starts_with("test result:");
        // A stack frame has a line with its number, and a line with its position.
        let is_frame = line.starts_with("   ") && self.in_backtrace;
        self.in_backtrace = line == "stack backtrace:" || is_frame;
        if self.in_backtrace || line.is_empty() || line == "failures:" {
            return;
        }
        match self.kept.len() < LINES_MAX {
            true => self.kept.push(line.to_owned()),
            false => self.left_out += 1,
        }
    }

    /// Returns the collected text; empty if no test failed.
    pub(crate) fn text(&self) -> String {
        let mut text = self.kept.join("\n");
        if self.left_out > 0 {
            text.push_str(&format!("\n({} lines more)", self.left_out));
        }
        text
    }
}

/// Text that a black-box test prints if something did not happen within the test's limit of time.
const TOO_LATE: &str = " in vain for: ";

/// Returns the names of the failed tests of an executable if each one failed only because a limit of
/// time passed, and nothing if a test failed for another reason.
pub(crate) fn too_late(output: &str) -> Vec<String> {
    let mut names = Vec::new();
    for section in output.split("\n---- ").skip(1) {
        let Some((name, said)) = section.split_once(" stdout ----\n") else { continue };
        // The first panic is the cause of the failure. Other panics may follow when the test cleans
        // up.
        let message =
            said.split_once("panicked at ").map(|(_, place)| place.split('\n').nth(1).unwrap_or_default());
        if !message.is_some_and(|it| it.contains(TOO_LATE)) {
            return Vec::new();
        }
        names.push(name.to_owned());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(output: &str) -> String {
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.take(line));
        failures.text()
    }

    #[test]
    fn only_failures_are_kept() {
        let output = "test a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\nleft: 1\n  right: 2\n\
                      stack backtrace:\n   0: begin\n             at here.rs:1\nnote: details\n\nfailures:\n    b\n\n\
                      test result: FAILED. 1 passed; 1 failed\n\nrunning 1 test\ntest c ... ok\n";
        let kept = "---- b stdout ----\nleft: 1\n  right: 2\nnote: details\n    b\ntest result: FAILED. 1 passed; 1 failed";
        assert_eq!(text_of(output), kept);
        assert_eq!(text_of("test a ... ok\ntest result: ok. 1 passed\n"), "");
    }

    #[test]
    fn a_limit_of_time_differs_from_wrong_data() {
        let failed = |name: &str, message: &str| {
            format!(
                "\n---- {name} stdout ----\nguest: up\n\nthread '{name}' (7) panicked at a.rs:1:5:\n{message}\nnote: run\n"
            )
        };
        let late = failed("b::late", "waited 60s in vain for: the verdict");
        let wrong = failed("wrong", "byte 0: 1, not 2: waited");
        let output = |failures: &[&str]| {
            let sections = failures.concat();
            format!(
                "running 3 tests\ntest a ... ok\n\nfailures:\n{sections}\n\nfailures:\n    a\n\ntest result: FAILED."
            )
        };
        assert_eq!(too_late(&output(&[&late])), ["b::late"]);
        assert_eq!(too_late(&output(&[&late, &failed("c", "waited 1s in vain for: it")])), ["b::late", "c"]);
        assert!(too_late(&output(&[&late, &wrong])).is_empty());
        let second =
            format!("{wrong}thread 'wrong' (7) panicked at b.rs:1:5:\nwaited 1s in vain for: the end\n");
        assert!(too_late(&output(&[&second])).is_empty());
        assert!(too_late("test result: ok. 3 passed").is_empty());
    }

    #[test]
    fn a_flood_is_cut() {
        let output = format!("failures:\n{}", "line\n".repeat(LINES_MAX + 7));
        assert!(text_of(&output).ends_with("line\n(7 lines more)"));
    }
}

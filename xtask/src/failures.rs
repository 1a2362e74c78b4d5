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
    fn a_flood_is_cut() {
        let output = format!("failures:\n{}", "line\n".repeat(LINES_MAX + 7));
        assert!(text_of(&output).ends_with("line\n(7 lines more)"));
    }
}

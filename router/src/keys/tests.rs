use tokio::signal::unix::{SignalKind, signal};

use super::*;
use crate::standing::Standing;

/// Of the keys "one" and "two".
const ONE: &str = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
const TWO: &str = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

fn keys(text: &str) -> Result<Keys, String> {
    Keys::default().next(text.to_owned(), true)
}

fn ring(text: &str) -> KeyRing {
    KeyRing { path: PathBuf::new(), predicts: true, keys: RwLock::new(Arc::new(keys(text).unwrap())) }
}

fn name(ring: &KeyRing, header: &str) -> Option<String> {
    ring.tenant(Some(header.as_bytes())).ok().map(|tenant| tenant.name().to_owned())
}

#[test]
fn a_priority_that_no_request_may_have_is_refused_by_name() {
    let with = |highest: i64| {
        keys(&format!("[[tenants]]\nname = 'a'\nsha256 = ['{ONE}']\nhighest_priority = {highest}")).err()
    };
    let error = with(2_000_000_000).unwrap();
    assert!(error.contains("highest_priority: is 2000000000; it must be between -536870912 and"), "{error}");
    assert_eq!(with(-536_870_912), None);
}

#[test]
fn a_key_leads_to_its_tenant() {
    let ring = ring(&format!(
        "[[tenants]]\nname = 'a'\nsha256 = ['{ONE}']\n[[tenants]]\nname = 'b'\nsha256 = ['{}']",
        TWO.to_uppercase()
    ));
    assert_eq!(name(&ring, "Bearer one").as_deref(), Some("a"));
    assert_eq!(name(&ring, "bearer  two ").as_deref(), Some("b"));
    for bad in ["Bearer three", "Bearer ", "Bearer", "Basic one", "one", ""] {
        let error = ring.tenant(Some(bad.as_bytes())).unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::Unauthenticated, Some("invalid_api_key")), "{bad:?}");
    }
    assert_eq!(ring.tenant(None).unwrap_err().kind, ErrorKind::Unauthenticated);
}

#[test]
fn a_bad_file_says_what_is_wrong() {
    let entry =
        |name: &str, hash: &str, more: &str| format!("[[tenants]]\nname = '{name}'\nsha256 = ['{hash}']\n{more}\n");
    for (text, wrong) in [
        ("x".to_owned(), "expected"),
        ("[[tenants]]\nname = 'a'".to_owned(), "sha256"),
        (entry("a b", ONE, ""), "tenants[0].name: it must have"),
        (entry("", ONE, ""), "it must have"),
        (entry("a", "12", ""), "64 hex digits"),
        (
            "[[tenants]]\nname = 'a'\nsha256 = 'baton-0123456789abcdef0123456789'".to_owned(),
            "line 3, sha256: invalid type, expected a sequence",
        ),
        (entry("a", &"+f".repeat(32), ""), "64 hex digits"),
        (entry("a", ONE, "request_per_minute = 5"), "line 4: unknown field; did you mean requests_per_minute?"),
        (entry("a", ONE, "colour = 5"), "line 4: unknown field, expected one of `name`, `sha256`"),
        (entry("a", ONE, "streams = -1"), "line 4, streams: invalid value, expected u32"),
        (entry("a", ONE, "weight = 0"), "a: weight is 0; it must be 1 to 1000"),
        (entry("a", ONE, "class = 'flex'"), "a: class: it must be interactive or batch"),
        (entry("a", ONE, "reject_ttft = 5"), "reject_ttft"),
        (entry("a", ONE, "reject_ttft = 'soon'"), "a: reject_ttft: "),
        (entry("a", ONE, "reject_itl = '0s'"), "a: reject_itl: it is 0; it must be above 0"),
        (entry("a", ONE, "") + &entry("a", TWO, ""), "there twice"),
        (entry("a", ONE, "") + &entry("b", ONE, ""), "there twice"),
    ] {
        let error = keys(&text).unwrap_err();
        assert!(error.contains(wrong), "{text}: {error}");
    }
    assert!(keys("").unwrap().tenants.is_empty(), "nobody may ask");
    let slo = entry("a", ONE, "reject_ttft = '1500ms'");
    let time = Some(Duration::from_millis(1500));
    let standing = keys(&slo).unwrap().known["a"].standing(Standing::default());
    assert_eq!(standing.unwrap().slo, Slo { first_token: time, ..Slo::default() });
    let standing = keys(&entry("a", ONE, "class = 'batch'")).unwrap().known["a"].standing(Standing::default());
    assert!(standing.unwrap().class.is_batch());
    let error = Keys::default().next(slo, false).unwrap_err();
    assert!(error.starts_with("a: reject_ttft and reject_itl need the router's placement"), "{error}");
}

#[test]
fn a_key_is_not_told_wherever_it_is() {
    const KEY: &str = "sk-short";
    for entry in [
        format!("sha256 = '{KEY}'"),
        format!("sha256 = ['{KEY}']"),
        format!("sha256 = {KEY}"),
        format!("sha256 = [{KEY}==]"),
        format!("sha256 = [\n'{ONE}',\n{KEY}==\n]"),
        format!("sha256 = ['{ONE}']\n{KEY} = 5"),
        format!("sha256 = ['{ONE}']\n{KEY}"),
        format!("sha256 = ['{ONE}']\n{KEY} = 5\n{KEY} = 6"),
        format!("sha256 = ['{ONE}']\n[tenants.{KEY}]\n[tenants.{KEY}]"),
        format!("sha256 = ['{ONE}']\nclass = '{KEY}'"),
        format!("sha256 = ['{ONE}']\nreject_ttft = '{KEY}'"),
        format!("sha256 = ['{ONE}']\nweight = '{KEY}'"),
        format!("sha256 = ['{ONE}']\nweight = {KEY}"),
        format!("sha256 = ['{ONE}']\nkeep_kv = '{KEY}, expected a boolean'"),
        format!("sha256 = ['{ONE}']\n[[tenants]]\nname = '{KEY} two'\nsha256 = ['{TWO}']"),
    ] {
        let error = keys(&format!("[[tenants]]\nname = 'a'\n{entry}")).unwrap_err();
        assert!(!error.contains(KEY), "{entry}: {error}");
        assert!(error.contains("line ") || error.starts_with("a: ") || error.starts_with("tenants["), "{error}");
    }
}

#[test]
fn a_tenant_stays_the_same_when_the_file_changes() {
    let entry = |hash: &str, streams: u32| format!("[[tenants]]\nname = 'a'\nsha256 = ['{hash}']\nstreams = {streams}");
    let ring = ring(&entry(ONE, 1));
    let tenant = ring.tenant(Some(b"Bearer one")).unwrap();
    let _pass = tenant.admit(1).unwrap();
    ring.replace(entry(TWO, 2)).unwrap();
    assert!(ring.tenant(Some(b"Bearer one")).is_err(), "the key is gone");
    let same = ring.tenant(Some(b"Bearer two")).unwrap();
    assert!(Arc::ptr_eq(&tenant, &same));
    let _second = same.admit(1).unwrap();
    assert!(same.admit(1).is_err(), "the first is still counted");
    assert!(ring.replace("bad".to_owned()).is_err());
    assert!(ring.tenant(Some(b"Bearer two")).is_ok(), "the old keys stay");
}

/// The keys of a file that changed, and how long it took until they were known.
async fn watched(signalled: bool) -> Duration {
    let (folder, one) = (tempfile::tempdir().unwrap(), format!("[[tenants]]\nname = 'a'\nsha256 = ['{ONE}']"));
    let path = folder.path().join("keys.toml");
    std::fs::write(&path, &one).unwrap();
    let ring = Arc::new(KeyRing::open(&path, true).unwrap());
    let mut hangups = [(); 2].map(|()| signal(SignalKind::hangup()).unwrap());
    if signalled {
        let pid = std::process::id().to_string();
        assert!(std::process::Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
        // Then the other has it, too.
        hangups[0].recv().await.unwrap();
    }
    std::fs::write(&path, one.replace(ONE, TWO)).unwrap();
    // From now on time goes on only where everybody waits for it.
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let [_, signals] = hangups;
    let watches = tokio::spawn(Arc::clone(&ring).watch(Some(signals), Shutdown::new(Duration::ZERO)));
    while name(&ring, "Bearer two").is_none() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    watches.abort();
    let took = begun.elapsed();
    tokio::time::resume();
    took
}

#[tokio::test]
async fn a_changed_file_is_read_again_and_at_once_on_a_signal() {
    let soon = LOOK_AGAIN + Duration::from_millis(100);
    let (by_itself, on_a_signal) = (watched(false).await, watched(true).await);
    assert!(on_a_signal <= soon, "{on_a_signal:?} after SIGHUP");
    assert!((LOOK_EVERY..=LOOK_EVERY + soon).contains(&by_itself), "{by_itself:?} without one");
}

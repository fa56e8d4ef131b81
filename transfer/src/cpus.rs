//! Which CPUs transfer threads run on.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use baton_handoff::TransferError;
use baton_types::Expects;

/// Most CPUs of which the two ends of a handoff have different ones, if none are named. Where there are more, the system finds a free one for each.
const FEW: usize = 16;

/// An end of handoffs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Receiver,
    Sender,
}

/// CPUs by their numbers in the system. Empty: none are named. As text: numbers and ranges, such as `0-3,8`.
///
/// Transfer threads copy and digest blocks. They are fastest on CPUs close to the memory of the pool and to the network card.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cpus(BTreeSet<usize>);

impl Cpus {
    /// The CPUs this thread may run on: those of the process, unless the thread was pinned.
    pub fn allowed() -> std::io::Result<Cpus> {
        let set = sched_getaffinity(None)?;
        Ok(Cpus((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()))
    }

    /// Whether `all` holds all of them.
    pub fn are_among(&self, all: &Cpus) -> bool {
        self.0.is_subset(&all.0)
    }

    /// The `count` CPUs with the lowest numbers.
    pub fn first(&self, count: usize) -> Cpus {
        Cpus(self.0.iter().copied().take(count).collect())
    }

    /// Those that `others` does not hold.
    pub fn without(&self, others: &Cpus) -> Cpus {
        Cpus(self.0.difference(&others.0).copied().collect())
    }

    /// Whether `others` holds none of them.
    pub fn are_apart(&self, others: &Cpus) -> bool {
        self.0.is_disjoint(&others.0)
    }

    /// Fails when the process may not use one of them.
    pub fn check(&self) -> Result<(), TransferError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let allowed = Cpus::allowed().map_err(|error| TransferError::os("ask which CPUs may be used", error))?;
        match self.are_among(&allowed) {
            true => Ok(()),
            false => Err(TransferError::argument("cpus", format!("{self}, of which this process may use {allowed}"))),
        }
    }

    /// The CPUs that the threads of an end run on: those that are named here.
    ///
    /// If none are named and the process may use few, one end has the even ones, the other end the odd ones. So the sender copies on one CPU while
    /// the receiver digests on another, also where they are two processes: the system sometimes queues both for one CPU.
    pub(crate) fn of(&self, end: End) -> Result<Cpus, TransferError> {
        self.check()?;
        if !self.0.is_empty() {
            return Ok(self.clone());
        }
        Ok(Cpus::allowed().map(|allowed| allowed.half(end)).unwrap_or_default())
    }

    /// Those with even numbers, or with odd ones, so that ends with different sets have different CPUs, too. Empty, for any, if one end would have
    /// none, or if there are many.
    fn half(&self, end: End) -> Cpus {
        let of = |end: End| self.0.iter().copied().filter(move |cpu| cpu % 2 == end as usize);
        let both = of(End::Receiver).next().is_some() && of(End::Sender).next().is_some();
        Cpus(of(end).filter(|_| both && self.0.len() <= FEW).collect())
    }

    /// Pins this thread to them. If the process has lost them since they were checked, the thread runs where it may.
    pub fn pin(&self) {
        if !self.0.is_empty() {
            let mut set = CpuSet::new();
            self.0.iter().for_each(|cpu| set.set(*cpu));
            if let Err(error) = sched_setaffinity(None, &set) {
                tracing::warn!(%error, cpus = %self, "a transfer thread runs elsewhere than it should");
            }
        }
    }
}

impl Expects for Cpus {
    const EXPECTS: &'static str = "CPUs, such as 0-3,8";
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Cpus, String> {
        let mut cpus = BTreeSet::new();
        for part in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse::<usize>().ok().filter(|cpu| *cpu < CpuSet::MAX_CPU);
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => {
                    let most = CpuSet::MAX_CPU - 1;
                    return Err(format!("{part:?} is no CPU and no range of CPUs, 0 to {most}, such as 0-3"));
                }
            }
        }
        Ok(Cpus(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts =
            self.0.iter().copied().filter(|cpu| cpu.checked_sub(1).is_none_or(|before| !self.0.contains(&before)));
        let range = |first: usize| match (first..).take_while(|cpu| self.0.contains(cpu)).last() {
            Some(last) if last > first => format!("{first}-{last}"),
            _ => first.to_string(),
        };
        f.write_str(&starts.map(range).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_numbers_and_ranges() {
        for (text, shown) in
            [("", ""), (" ", ""), ("3", "3"), ("0-3,8", "0-3,8"), ("8, 2,0-1,1-2", "0-2,8"), ("5-5", "5")]
        {
            let cpus: Cpus = text.parse().unwrap();
            assert_eq!(cpus.to_string(), shown, "{text:?}");
            assert_eq!(shown.parse(), Ok(cpus));
        }
        for bad in ["a", "1,", "3-1", "-1", "1024", "0-99999999999", "1--2"] {
            assert!(bad.parse::<Cpus>().unwrap_err().contains("is no CPU"), "{bad}");
        }
    }

    #[test]
    fn threads_stay_on_the_cpus_that_are_named_and_others_are_refused() {
        let mine = Cpus::allowed().unwrap();
        assert!(mine.check().is_ok() && Cpus::default().check().is_ok());
        assert!([End::Receiver, End::Sender].iter().all(|end| mine.of(*end).unwrap() == mine));
        let foreign = Cpus([(0..).find(|cpu| !mine.0.contains(cpu)).unwrap()].into());
        let error = foreign.check().unwrap_err().to_string();
        assert!(error.contains(&format!("{foreign}, of which this process may use {mine}")), "{error}");
        for cpu in mine.0.iter().copied() {
            let (one, (tell, told)) = (Cpus([cpu].into()), std::sync::mpsc::channel());
            let run = move || drop(tell.send(Cpus::allowed().unwrap()));
            crate::threads::spawn("pinned".into(), &one, run).unwrap().join().unwrap();
            assert_eq!(told.recv().unwrap(), one);
        }
        assert_eq!(Cpus::allowed().unwrap(), mine, "who starts such a thread is not moved");
    }

    #[test]
    fn the_ends_of_a_handoff_have_different_cpus_where_there_are_few() {
        let halves = |cpus: &str| {
            let cpus: Cpus = cpus.parse().unwrap();
            [End::Receiver, End::Sender].map(|end| cpus.half(end).to_string())
        };
        assert_eq!(halves("0-1"), ["0", "1"]);
        assert_eq!(halves("3,5,8-10"), ["8,10", "3,5,9"]);
        let any = ["", ""];
        for cpus in ["4", "4,6", "0-16"] {
            assert_eq!(halves(cpus), any, "{cpus}");
        }
        assert_ne!(halves("0-15"), any);
    }
}

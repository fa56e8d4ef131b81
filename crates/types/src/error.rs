//! Kinds of errors, and whose fault each is.
//!
//! This is the only place that maps errors to gRPC codes and HTTP statuses. Every crate's error enum implements [`BatonError::kind`].

/// Whose fault an error is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The caller sent something that can never work. While a worker starts, the caller is whoever chose its settings and model.
    Client,
    /// This process.
    Server,
    /// Another worker, or the network in between.
    Peer,
}

/// The kinds of errors that clients and the router's recovery distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// A field has a value that can never work: one of a request, or, while a process starts, a setting or a part of the model's files.
    /// Clients read it as their own fault, so what goes wrong at a worker once it serves is never of this kind, unless the request is wrong.
    InvalidArgument,
    /// The caller has not shown who it is.
    Unauthenticated,
    /// The caller may not do this.
    PermissionDenied,
    /// The named thing does not exist.
    NotFound,
    /// A body or a prompt is over a limit.
    TooLarge,
    /// There is no room now; a later attempt may work.
    ResourceExhausted,
    /// The request's deadline passed.
    DeadlineExceeded,
    /// The caller went away.
    Cancelled,
    /// The worker is gone, draining or unreachable; another one may work.
    Unavailable,
    /// The path between two workers broke in the middle of a handoff. Both workers may be well and have another path.
    PathLost,
    /// KV failed verification.
    DataLoss,
    /// Two workers whose KV layouts differ. Nothing else: clients read it as `layout_mismatch_error`.
    FailedPrecondition,
    /// A defect in Baton.
    Internal,
}

impl ErrorKind {
    /// Every kind, for tables and tests.
    pub const ALL: [ErrorKind; 13] = [
        ErrorKind::InvalidArgument,
        ErrorKind::Unauthenticated,
        ErrorKind::PermissionDenied,
        ErrorKind::NotFound,
        ErrorKind::TooLarge,
        ErrorKind::ResourceExhausted,
        ErrorKind::DeadlineExceeded,
        ErrorKind::Cancelled,
        ErrorKind::Unavailable,
        ErrorKind::PathLost,
        ErrorKind::DataLoss,
        ErrorKind::FailedPrecondition,
        ErrorKind::Internal,
    ];

    /// Whose fault it is.
    pub fn fault(self) -> Fault {
        use ErrorKind::*;
        match self {
            InvalidArgument | Unauthenticated | PermissionDenied | NotFound | TooLarge | Cancelled => Fault::Client,
            Unavailable | PathLost | DataLoss | FailedPrecondition => Fault::Peer,
            ResourceExhausted | DeadlineExceeded | Internal => Fault::Server,
        }
    }

    /// The gRPC status code.
    pub fn grpc_code(self) -> i32 {
        use ErrorKind::*;
        match self {
            Cancelled => 1,
            InvalidArgument | TooLarge => 3,
            DeadlineExceeded => 4,
            NotFound => 5,
            PermissionDenied => 7,
            ResourceExhausted => 8,
            FailedPrecondition => 9,
            PathLost => 10,
            Internal => 13,
            Unavailable => 14,
            DataLoss => 15,
            Unauthenticated => 16,
        }
    }

    /// The kind a gRPC status code stands for.
    pub fn from_grpc_code(code: i32) -> ErrorKind {
        use ErrorKind::*;
        match code {
            1 => Cancelled,
            3 | 11 => InvalidArgument,
            4 => DeadlineExceeded,
            5 => NotFound,
            7 => PermissionDenied,
            8 => ResourceExhausted,
            9 => FailedPrecondition,
            10 => PathLost,
            14 => Unavailable,
            15 => DataLoss,
            16 => Unauthenticated,
            _ => Internal,
        }
    }

    /// The HTTP status.
    pub fn http_status(self) -> u16 {
        use ErrorKind::*;
        match self {
            InvalidArgument => 400,
            Unauthenticated => 401,
            PermissionDenied => 403,
            NotFound => 404,
            TooLarge => 413,
            ResourceExhausted => 429,
            Cancelled => 499,
            Internal | DataLoss | FailedPrecondition => 500,
            Unavailable | PathLost => 503,
            DeadlineExceeded => 504,
        }
    }

    /// A stable word for logs, metrics labels and the `type` of an OpenAI error object.
    pub fn as_str(self) -> &'static str {
        use ErrorKind::*;
        match self {
            InvalidArgument => "invalid_request_error",
            Unauthenticated => "authentication_error",
            PermissionDenied => "permission_error",
            NotFound => "not_found_error",
            TooLarge => "request_too_large",
            ResourceExhausted => "overloaded_error",
            DeadlineExceeded => "timeout_error",
            Cancelled => "cancelled",
            Unavailable => "unavailable_error",
            PathLost => "path_lost_error",
            DataLoss => "kv_verification_error",
            FailedPrecondition => "layout_mismatch_error",
            Internal => "internal_error",
        }
    }
}

/// Every error enum of the project.
pub trait BatonError: std::error::Error {
    /// What kind of error this is.
    fn kind(&self) -> ErrorKind;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_survive_the_wire() {
        for kind in ErrorKind::ALL {
            let back = ErrorKind::from_grpc_code(kind.grpc_code());
            // gRPC has no code for size, so it arrives as an invalid argument.
            let want = if kind == ErrorKind::TooLarge { ErrorKind::InvalidArgument } else { kind };
            assert_eq!(back, want);
        }
    }
}

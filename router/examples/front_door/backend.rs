//! An OpenAI-compatible worker over HTTP/1.1, for routers that pass HTTP through. It reads of a request only what its pace needs.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::Arguments;
use super::pace::{Pace, Steps};

/// Serves until it is killed.
pub async fn serve(arguments: &Arguments) {
    let listener = TcpListener::bind(arguments.must("listen")).await.unwrap();
    let pace = arguments.pace();
    let steps = Steps::start(pace);
    println!("listening");
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let steps = steps.clone();
        tokio::spawn(async move {
            // A client that goes away ends its connection.
            let _ = connection(stream, pace, steps).await;
        });
    }
}

async fn connection(mut stream: TcpStream, pace: Pace, steps: Steps) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let Some((head, body)) = request(&mut stream, &mut buffer).await? else { return Ok(()) };
        if !head.starts_with("POST") {
            let page = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", page.len());
            stream.write_all((head + page).as_bytes()).await?;
            continue;
        }
        let end = number(&body, "\"max_tokens\":").unwrap_or(16);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        tokio::time::sleep(pace.first).await;
        stream.write_all(chunk(&event(0..1)).as_bytes()).await?;
        let mut ready = steps.add(1..end);
        while let Some(indices) = ready.recv().await {
            stream.write_all(chunk(&event(indices)).as_bytes()).await?;
        }
        let usage =
            format!("data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":1,\"completion_tokens\":{end}}}}}\n\n");
        let last = chunk(&usage) + &chunk("data: [DONE]\n\n") + "0\r\n\r\n";
        stream.write_all(last.as_bytes()).await?;
    }
}

/// The events of some tokens, each as long as the ones of real workers.
fn event(indices: std::ops::Range<u32>) -> String {
    let of = |_| {
        "data: {\"id\":\"cmpl-0123456789abcdef\",\"object\":\"text_completion\",\"created\":1795477535,\"model\":\"tiny\",\
         \"choices\":[{\"index\":0,\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null}]}\n\n"
    };
    indices.map(of).collect()
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// Reads the head and the body of the next request. None at the end of the connection.
async fn request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<(String, String)>> {
    loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..at]).to_ascii_lowercase().replacen("post", "POST", 1);
            let length = number(&head, "content-length: ").unwrap_or(0) as usize;
            while buffer.len() < at + 4 + length {
                if stream.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            let body = String::from_utf8_lossy(&buffer[at + 4..at + 4 + length]).into_owned();
            buffer.drain(..at + 4 + length);
            return Ok(Some((head, body)));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

/// The number after a word.
pub fn number(text: &str, word: &str) -> Option<u32> {
    let rest = text[text.find(word)? + word.len()..].trim_start();
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().ok()
}
